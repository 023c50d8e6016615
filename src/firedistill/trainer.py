"""`SelfDistillTrainer`: a training step bound to `transformers.Trainer`.

One optimizer step, from top to bottom: `get_batch_samples` samples, judges, builds feedback and divides the rollouts into
micro-batches; `compute_loss` scores a micro-batch and applies the method; after the optimizer step `StepCallbacks` moves the EMA
teacher and writes the row of `metrics.jsonl`. The stages are functions of `firedistill.step`, the methods are in
`firedistill.objectives`. `examples/fire_loop.py` is the same loop without `Trainer`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback

from firedistill.attribution import Inspector, save_attribution
from firedistill.checks import Preflight, check
from firedistill.config import SelfDistillConfig, WarmStartConfig
from firedistill.evaluation import answer_examples, evaluate_all
from firedistill.files import read_json, write_text, written_whole
from firedistill.memory import (
    LOADING,
    SMALLER_EVALUATIONS,
    SMALLER_MICRO_BATCHES,
    SMALLER_ROLLOUTS,
    BatchLimit,
    explained_memory,
    held_memory,
    scoring_limit,
)
from firedistill.metrics import Metrics, over_processes, synchronize
from firedistill.models.lora import trained_parameters
from firedistill.models.sharding import copy_from_first_process, gather, lockstep, wait_for_processes
from firedistill.models.states import is_sharded, last_hidden_states, score_responses, unwrap
from firedistill.objectives import MicroBatch, Objective, Step, load_objective
from firedistill.ops import Head, check_head
from firedistill.policy import PolicyChange
from firedistill.prompts import shown_prompt
from firedistill.report.curves import CurvesAtTheEnd
from firedistill.rollout import Rollout
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.load import close, load_engines, metrics_of
from firedistill.rollouts.sampler import Sampler, fitting_prompts
from firedistill.rollouts.server import VLLMServerEngine
from firedistill.run.card import model_card
from firedistill.run.checkpoints import CheckpointError, load_state, random_state, restore_random_state, save_state
from firedistill.run.console import ConsoleReport
from firedistill.run.identity import data_fingerprint, model_fingerprint, to_plain, tokenizer_fingerprint
from firedistill.run.log import RunLog, rollout_row
from firedistill.run.resume import ResumableTrainer
from firedistill.run.trackers import guard_trackers, name_in_trackers
from firedistill.setup import given_examples, load_setup
from firedistill.step import (
    TrainingOrder,
    Update,
    engine_gap,
    learning_rate_factor,
    plan_updates,
    rollout_metrics,
    select_rollouts,
    step_seed,
)
from firedistill.tasks import Example
from firedistill.tasks.guard import GuardedTask

logger = logging.getLogger(__name__)

COUNTERS = "firedistill_counters.json"


@dataclass
class StepRecord:
    """The state of the current step between the calls of `Trainer`.

    Attributes:
        update: the optimizer update that is being computed.
        uids: examples of its micro-batches so far.
        loss: summed over the updates of the step.
        grad_norms: before clipping, one per update.
        of_method: what the method logs, apart from `metrics`, whose names it may not use.
        skipped: the present update changes neither student nor teacher.
        before_step, before_update: the policy that the step and the present update began with, where they are compared with it.
    """

    learning_rate: float
    step_scale: float
    started: float
    metrics: Metrics = field(default_factory=Metrics)
    of_method: Metrics = field(default_factory=Metrics)
    update: Update = field(default_factory=lambda: Update([], 0, 0))
    uids: list[str] = field(default_factory=list)
    loss: float | Tensor = 0.0
    grad_norms: list[float] = field(default_factory=list)
    skipped: bool = False
    skipped_updates: int = 0
    before_step: PolicyChange | None = None
    before_update: PolicyChange | None = None


class SelfDistillTrainer(ResumableTrainer):
    """Feedback-based on-policy self-distillation.

    Args:
        model: a causal language model, its name or folder, or a `PeftModel` with one LoRA adapter, whose training is continued;
            `args.model` is loaded by default. Any other model gets a LoRA adapter (`args.initial_adapter` continues from a saved one).
        args: the settings; the trainer works on a copy.
        task: a task, its name, or rows: a list of mappings, a `datasets.Dataset`; `args.task` by default.
        train_examples, eval_examples: examples, or rows with the fields of `Example` or the columns that the task reads; taken from the
            task by default.
        processing_class: the tokenizer; the model's own by default, required with a model object.
        callbacks, optimizers: as in `transformers.Trainer`. The optimizer holds parameters of the adapter, so that `model` must be a
            `PeftModel`; its rate takes the place of `args.learning_rate`.

    Attributes:
        config_class: the settings that the class takes.
        task: the task in a `GuardedTask`: `verify` always returns a verdict, `feedback` returns fields or raises `TaskFault`.
        last_metrics: the row of the last step.
        console_report: prints a line per step; None with `args.disable_tqdm`.
        on_progress: called as `on_progress(phase, done, total=...)` during a step; the command line shows a bar.

    Raises:
        ValueError: settings, model, tokenizer, task or examples are invalid or do not fit together; the message says what to change.
        TypeError: `processing_class` is not a tokenizer, or the examples cannot be iterated.
        ImportError: a package that the settings need is not installed.
    """

    config_class: ClassVar[type[SelfDistillConfig]] = SelfDistillConfig
    train_dataset: TrainingOrder  # which Trainer declares more widely

    # The loss is already divided by the number of prompts over all micro-batches.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | str | None = None,
        args: SelfDistillConfig | None = None,
        task: Any = None,
        train_examples: Iterable[Any] | None = None,
        eval_examples: Iterable[Any] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] | None = None,
    ):
        optimizers = optimizers or (None, None)
        args = self.config_class() if args is None else args
        warm = isinstance(args, WarmStartConfig)
        if warm != issubclass(self.config_class, WarmStartConfig):
            kind, use = type(self).__name__, "WarmStartTrainer" if warm else self.config_class.__name__
            raise ValueError(f"{kind} does not fit args, which is a {type(args).__name__}: use {use}")
        if optimizers[1] is not None and "metrics" in signature(optimizers[1].step).parameters:
            raise ValueError(
                f"the schedule is a {type(optimizers[1]).__name__}, which follows a metric of evaluations: pass one that depends on "
                "the step, such as LambdaLR"
            )
        self.setup = load_setup(
            args,
            model=model,
            tokenizer=processing_class,
            task=task,
            train_examples=train_examples,
            eval_examples=eval_examples,
        )
        if optimizers[0] is not None:
            check_parameters(self.setup.model, optimizers[0])
            take_rate(self.setup.args, optimizers[0])
        args, self.task, self.encoder = self.setup.args, self.setup.task, self.setup.encoder
        self.eval_examples, self.own_eval_examples = self.setup.eval_examples, eval_examples is not None
        self.objective: Objective = load_objective(args.method, args.method_settings)
        self.prompts_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        with explained_memory(LOADING):  # the model moves to the device
            super().__init__(
                model=self.setup.model,
                args=args,
                data_collator=list,
                train_dataset=TrainingOrder(self.setup.train_examples, args.max_steps * self.prompts_per_step, args.seed),
                eval_dataset=self.eval_examples or None,
                processing_class=self.setup.tokenizer,
                callbacks=[StepCallbacks(self), *(callbacks or [])],
                optimizers=optimizers,
            )
            base = unwrap(self.model)
            if not (is_sharded(base) or getattr(base, "is_quantized", False)):
                self.model.to(args.device)  # DeepSpeed would move it when training starts, after engine and teacher are made
        if self.is_fsdp_enabled:
            raise ValueError(
                "accelerate's FSDP is not supported, because it shards the adapter with the base model. Use --fsdp_size N, which "
                "spreads the base model alone over N processes, or --quantization nf4"
            )
        # What clipping visits; the model has thousands of modules.
        self.trained = nn.ParameterList(trained_parameters(self.model).values())
        self.model_accepts_loss_kwargs = True  # what transformers 5.16 reads instead of loss_is_scaled_for_ga
        # The first one is another in a notebook.
        for unwanted in (DEFAULT_PROGRESS_CALLBACK, ProgressCallback, PrinterCallback):
            self.remove_callback(unwanted)
        self.trackers = guard_trackers(self.callback_handler.callbacks)

        adjustable = not self.sharded and lockstep(self.model) is None
        self.limits = {
            "rollouts": BatchLimit(args.rollout_batch_size, "rollout_batch_size", SMALLER_ROLLOUTS, adjustable=adjustable),
            "evaluation": BatchLimit(args.eval_batch_size, "eval_batch_size", SMALLER_EVALUATIONS, adjustable=adjustable),
            "scoring": scoring_limit(args.tokens_per_forward, adjustable=adjustable),
        }
        # Its own, so that a measurement that is short of memory does not change how the run is computed.
        name = "score_tokens_per_forward of the measured policy"
        self.policy_limit = scoring_limit(args.tokens_per_forward, name, adjustable=adjustable)
        self.rollout_engine, self.eval_engine = load_engines(self.model, self.setup.tokenizer, args, self.limits)
        # Each process of a script may have drawn its own factors. DDP copies them, too, but after the teacher has been made.
        copy_from_first_process(self.trained, args.device)
        self.teacher = self.setup.teacher(self.limits["scoring"])
        self.head = Head.of(unwrap(self.model), temperature=args.score_temperature)
        check_head(self.model, self.head)
        self.run_log: RunLog | None = None  # created when training starts
        self.record: StepRecord  # of the current step; there is none before the first one
        self.last_metrics: dict[str, Any] = {}
        self._identity: dict[str, Any] | None = None
        self.counters = {"cumulative_generated_tokens": 0, "cumulative_train_seconds": 0.0, "skipped_updates": 0}
        self.on_progress = lambda phase, done, total: None
        self.console_report: ConsoleReport | None = None
        if not args.disable_tqdm:
            self.console_report = ConsoleReport(self)
            self.add_callback(self.console_report)
            self.add_callback(CurvesAtTheEnd())

    # ---- Algorithm 1 ---------------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Example]], num_batches: int, device: torch.device
    ) -> tuple[list[list[tuple[Rollout, Any]]], int]:
        """The prompts of one step, sampled in one go, judged, with feedback, and prepared by the method; as micro-batches."""
        examples = [example for batch in islice(epoch_iterator, num_batches) for example in batch]
        self.take_random_state()
        learning_rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        self.record = StepRecord(learning_rate, self.args.step_scale_at(learning_rate), started=time.perf_counter())
        metrics = self.record.metrics

        with metrics.timed("seconds_rollout", self.args.device):
            rollouts, sampled = self.sample(examples)
        selection = select_rollouts(
            rollouts, self.objective, self.teacher, self.args.budget, self.args.drop_unfinished_rollouts
        )
        if self.args.log_rollouts:
            next_step = self.state.global_step + 1
            rows = gather(self.model, self.rollout_rows(selection.rollouts, next_step, selection.trained))
            if self.run_log is not None:
                self.run_log.rollouts(next_step, rows)
        step = Step(
            rollouts=selection.trained,
            prompts=self.prompts_per_step,
            progress=self.progress,
            seed=self.sampling_seed() ^ 0x5EED5EED,  # low bits: generators on a CPU ignore those above 32
            model=self.model,
            head=self.head,
            teacher=self.teacher,
        )
        prepared, diagnostics = pair(self.objective.prepare(step), "prepare", Sequence, self.args.method)
        if len(prepared) != len(selection.trained):
            raise ValueError(
                f"prepare of method {self.args.method} returned {len(prepared)} entries for {len(selection.trained)} rollouts"
            )
        self.teacher.forget()
        wait_for_processes(self.model)
        metrics.merge([sampled, selection.metrics, step.metrics])
        self.record.of_method.merge([diagnostics])
        if self.args.policy_kl_every and self.state.global_step % self.args.policy_kl_every == 0:
            with self.beside_training():
                self.record.before_step = self.policy_now(selection.trained)

        *earlier, last = plan_updates(
            self.objective,
            list(zip(selection.trained, prepared, strict=True)),
            self.prompts_per_step,
            random.Random(f"{self.args.seed} {self.state.global_step}"),
            self.args.process_index,
            self.args.world_size,
            self.train_dataset.examples,
        )
        for update in earlier:
            self.make_update(update, num_batches)
        return self.begin_update(last, num_batches), self.prompts_per_step

    def sample(self, examples: Sequence[Example]) -> tuple[list[Rollout], Metrics]:
        """The method's rollouts for these prompts, judged."""
        args, sampling = self.args, self.objective.sampling(self.args.sampling)
        first_index = args.process_index * len(examples)
        prompts, skipped = fitting_prompts(
            self.task, self.encoder, examples, sampling, args.budget, first_index, self.rollout_engine
        )
        total = len(prompts) * self.objective.responses_per_prompt
        sampler = Sampler(
            self.rollout_engine,
            self.task,
            self.encoder,
            sampling,
            args.budget,
            self.teacher,
            self.sampling_seed(),
            progress=partial(self.on_progress, "rollouts", total=total),
        )
        with explained_memory(SMALLER_ROLLOUTS):  # an engine may halve its batches by itself first
            rollouts = self.objective.sample(sampler, prompts, self.progress)
        metrics = rollout_metrics(rollouts).merge([metrics_of(self.rollout_engine)])
        if skipped:
            metrics.total(skipped_over_budget=len(skipped))
        return rollouts, metrics

    # Trainer declares batches of tensors; here a batch is a list of rollouts, and of examples in an evaluation.

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: list[tuple[Rollout, Any]],
        return_outputs: bool = False,
        num_items_in_batch: int | None = None,
    ) -> Tensor:
        """The method's loss on a micro-batch, scored with the live student and, where the method needs it, the EMA teacher."""
        record = self.record
        if not inputs:
            # Every rank and micro-batch takes part in the backward pass, with a gradient of zero.
            states = last_hidden_states(model, torch.zeros((1, 1), dtype=torch.long, device=self.args.device))
            wait_for_processes(self.model)
            return 0.0 * states.float().sum()
        rollouts, prepared = [rollout for rollout, _ in inputs], [entry for _, entry in inputs]
        record.uids += [rollout.example.uid for rollout in rollouts]
        student = score_responses(model, [r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts])
        batch = MicroBatch(
            rollouts=rollouts,
            prepared=prepared,
            student=student,
            head=self.head,
            teacher=self.teacher,
            responses=record.update.prompts * self.objective.responses_per_prompt,
            prompts=record.update.prompts,
            progress=self.progress,
            step_scale=record.step_scale,
            log_prob_floor=self.args.log_prob_floor,
        )
        loss, metrics = pair(self.objective.loss(batch), "loss", Tensor, self.args.method)
        if loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if loss.numel() != 1 else "a number without gradient"
            raise ValueError(
                f"loss of method {self.args.method} returned {what}: expected one number that depends on the student, also where "
                "nothing is trained, such as 0 * batch.student.hidden.sum()"
            )
        self.teacher.forget()
        first = not record.grad_norms  # the student is still the one that was handed over
        if first and any(rollout.response.log_probs for rollout in rollouts):
            record.metrics.mean(rollout_kl=engine_gap(student, rollouts, Head.of(unwrap(self.model))))
        wait_for_processes(self.model)
        loss = loss * self.args.world_size  # distributed wrappers average over processes, but the shares add up
        record.loss += loss.detach()
        record.of_method.merge([metrics])
        return loss

    def begin_update(self, update: Update, num_batches: int) -> list[list[tuple[Rollout, Any]]]:
        """The micro-batches of an update, which is now the current one."""
        self.record.update, self.record.skipped = update, False
        return update.micro_batches(num_batches, self.args.per_device_train_batch_size * self.objective.responses_per_prompt)

    def make_update(self, update: Update, num_batches: int) -> None:
        """An optimizer update before the last one of its step, which the inherited loop makes."""
        model, micro_batches = self.model_wrapped, self.begin_update(update, num_batches)
        for position, rollouts in enumerate(micro_batches, start=1):
            last = position == len(micro_batches)
            self.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else self.accelerator.no_sync(model):
                self.training_step(model, rollouts, self.prompts_per_step)
        self._get_grad_norm(model, self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)  # moves the teacher
        self.trained.zero_grad()

    def policy_now(self, rollouts: Sequence[Rollout]) -> PolicyChange:
        now = PolicyChange(self.model, rollouts, self.policy_limit, self.args.score_temperature)
        wait_for_processes(self.model)
        return now

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Leave the time of the block out of the step's."""
        synchronize(self.args.device)
        start = time.perf_counter()
        yield
        synchronize(self.args.device)
        self.record.started += time.perf_counter() - start

    def end_update(self) -> None:
        """After the optimizer's step: scale it back if the policy changed too much, and let the teacher follow (eq. sdpo_updates)."""
        record = self.record
        if record.before_update is not None:
            radius = cast(float, self.args.policy_step_radius)
            record.metrics.merge([record.before_update.scale_back(radius, self.mean_over_processes)])
            record.before_update = None
        self.teacher.update()

    def mean_over_processes(self, values: Tensor) -> float:
        parts = gather(self.model, [(float(values.double().sum()), len(values))])
        return sum(total for total, _ in parts) / sum(count for _, count in parts)

    @property
    def progress(self) -> float:
        """How far training is: 0 at the first step, 1 at the last."""
        return self.state.global_step / max(self.state.max_steps - 1, 1)

    @property
    def cumulative(self) -> dict[str, float]:
        """The counters that are columns of both logs."""
        return {name: value for name, value in self.counters.items() if name.startswith("cumulative")}

    @property
    def guarded(self) -> GuardedTask:
        return cast(GuardedTask, self.task)

    def sampling_seed(self) -> int:
        return step_seed(self.args.seed, self.state.global_step, self.args.process_index)

    # ---- The optimizer step --------------------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """Linear warm-up, then cosine (or constant); no step has rate 0."""
        if self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            kind = self.args.lr_scheduler_type
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda done: learning_rate_factor(done + 1, warmup, num_training_steps, kind)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return super()._clip_grad_norm(self.trained)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | Tensor | None = None) -> float | Tensor:
        """Called once per update, after clipping: one without trained rollouts, or with a non-finite gradient, is skipped.

        Without gradients the optimizer touches neither weights nor momentum; the schedule advances.
        """
        self.unsettle()
        grad_norm = super()._get_grad_norm(self.trained, grad_norm=grad_norm)
        record = self.record
        record.grad_norms.append(float(grad_norm))
        if record.update.trained_rollouts == 0 or not math.isfinite(float(grad_norm)):
            record.skipped = True
            record.skipped_updates += 1
            self.counters["skipped_updates"] += 1
            if record.update.trained_rollouts:
                logger.warning(
                    "step %d: the gradient is not finite, so nothing is updated; trained on: %s",
                    self.state.global_step + 1,
                    ", ".join(dict.fromkeys(record.uids)),
                )
            self.optimizer.zero_grad(set_to_none=True)
        elif self.args.policy_step_radius is not None:
            record.before_update = self.policy_now([rollout for rollout, _ in record.update.rollouts])
        return grad_norm

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with explained_memory(SMALLER_MICRO_BATCHES):
            return super().training_step(*args, **kwargs)

    def finish_step(self) -> None:
        """Reduce what the step found over all processes and write its row."""
        record = self.record
        synchronize(self.args.device)
        if record.before_step is not None:
            with self.beside_training():
                record.metrics.merge([record.before_step.metrics()])
                record.before_step = None  # and its hidden states
                wait_for_processes(self.model)
        total = time.perf_counter() - record.started
        metrics = record.metrics.merge([self.teacher.take_metrics()])
        metrics.total(**self.guarded.take_counts())
        if halved := sum(limit.halved for limit in self.limits.values()):
            metrics.total(out_of_memory=halved)
            for limit in self.limits.values():
                limit.halved = 0
        seconds = metrics.settle().seconds
        seconds["seconds_update"] = total - seconds["seconds_rollout"] - seconds.get("seconds_score", 0.0)
        held = held_memory(self.args.device) if lockstep(self.model) is not None else None
        ranks = gather_object([(metrics.on_host(), record.of_method.on_host(), float(record.loss), held)])
        row, of_method = (over_processes(rank[part] for rank in ranks).row() for part in (0, 1))
        naive, read = row.pop("naive_teacher_tokens", 0), row.pop("teacher_tokens", 0)
        norms, distance = record.grad_norms, self.teacher.weights.distance()
        self.counters["cumulative_generated_tokens"] += row["generated_tokens"]
        self.counters["cumulative_train_seconds"] += total
        own = {
            "step": self.state.global_step,
            "prompts": self.prompts_per_step,
            "loss": sum(loss for _, _, loss, _ in ranks) / len(ranks) / len(norms),
            "grad_norm": statistics.fmean(norms),
            **({"grad_norm_max": max(norms), "updates": len(norms)} if len(norms) > 1 else {}),
            "learning_rate": record.learning_rate,
            "step_scale": record.step_scale,
            **self.cumulative,
            "train_seconds": total,
            "teacher_tokens": read,
            "teacher_tokens_saved": naive - read if naive else 0,
        }
        after = {
            **{f"memory_mb_rank{rank}": held // 2**20 for rank, (_, _, _, held) in enumerate(ranks) if held is not None},
            **({} if distance is None else {"ema_distance": distance}),
            "skipped_update": record.skipped_updates,
            "skipped_updates": self.counters["skipped_updates"],
            **{name: count for name, count in self.failures().items() if count},
        }
        if taken := sorted((own | row | after).keys() & of_method.keys()):
            raise ValueError(
                f"method {self.args.method} logs a metric {taken[0]!r}, which is a column of every method: give it another name"
            )
        self.last_metrics = own | row | of_method | after
        if self.lock is not None:
            self.lock.check()
        if self.run_log is not None:
            self.run_log.metrics(self.last_metrics)
        if distance is not None and not math.isfinite(distance):
            raise self.not_finite("the adapter")

    def failures(self) -> dict[str, int]:
        """What failed around the run since the process started, without harm to it."""
        return {
            "failed_checkpoints": self.failed_checkpoints,
            "failed_writes": self.run_log.failed_writes if self.run_log is not None else 0,
            "failed_tracker_calls": sum(tracker.failed for tracker in self.trackers),
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.last_metrics.get("step") == self.state.global_step:
            logs = {**logs, **self.last_metrics}  # Trainer's loss is that of the last update alone
        super().log(logs, start_time)

    # ---- Evaluation ----------------------------------------------------------------------------------------------------------

    def evaluate(  # type: ignore[override]
        self, eval_dataset: Iterable[Any] | None = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ):
        """Evaluate on the held-out examples or on others. Held-out examples write a row of `evals.jsonl` and the responses once `train`
        has begun; others write nothing.

        Args:
            eval_dataset: other examples, or rows as in `eval_examples` of the trainer.
            ignore_keys: is not read.
            metric_key_prefix: begins the names that are returned and logged.

        Returns:
            The columns of the row about responses (docs/run-directory.md), with the prefix `metric_key_prefix`; shares are in [0, 1].

        Raises:
            ValueError: a row of `eval_dataset` is no example and is not read by the task.
            OutOfMemory (a ValueError): a single response does not fit.
            RolloutError, JudgeError (OSErrors): vLLM or the judge failed.
        """
        resuming = self._random_state is not None  # an evaluation that the checkpoint's run did not make
        self.take_random_state()
        own = eval_dataset is None  # what follows belongs to the run then
        examples = self.eval_examples if eval_dataset is None else given_examples(eval_dataset, self.task, "eval_dataset")
        found = evaluate_all(
            self.eval_engine,
            self.task,
            self.encoder,
            examples,
            self.setup.also if own else {},
            self.args,
            self.model,
            self.on_progress,
        )
        metrics_of(self.eval_engine)  # not of a training step
        judge = Metrics()
        judge.total(**self.guarded.take_counts())
        of_judge = over_processes(gather_object([judge])).row()
        step = self.state.global_step
        if own and self.run_log is not None:
            self.run_log.evaluation({"step": step, **self.cumulative, **found.summary, **of_judge})
            if self.args.log_rollouts:
                self.run_log.rollouts(step, self.rollout_rows(found.greedy, step), "eval")
                self.run_log.rollouts(step, self.rollout_rows(found.sampled, step), "sampled")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.summary.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if own:
            self.evaluation_due = False
        if step:
            self.settle()
        if resuming:
            self.keep_random_state()
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: there are no labelled batches."""
        raise ValueError("predict is for batches with labels: use evaluate(examples), which answers and judges the examples")

    # ---- The run directory ---------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """The settings of the run and fingerprints of its inputs, as plain JSON values."""
        if self._identity is None:
            kind, own, judge = self.args.teacher_kind, self.setup.teacher_model, self.guarded.judge_file
            given = {
                "base_model": model_fingerprint(self.model),
                "train_data": data_fingerprint(self.train_dataset.examples),
                "eval_data": data_fingerprint(self.eval_examples),
                "world_size": self.args.world_size,
                "teacher_weights": kind if own is None else model_fingerprint(own),
                "judge_file": None if judge is None else judge.fingerprint,
                "tokenizer": tokenizer_fingerprint(self.setup.tokenizer),
            }
            self._identity = to_plain({"settings": self.args.resolved(), "given": given})
        return self._identity

    def begin_run(self, step: int) -> None:
        """Open the run directory and remove the rows that the run will write again."""
        self.drop_unfinished_step()
        if self.is_world_process_zero():
            self.run_log = RunLog(self.args.run_dir)
            self.run_log.start(step, evaluated=not self.evaluation_due)
            self.args.save_yaml(Path(self.args.run_dir) / "config.yaml")
            if self.trackers:
                self.args.run_name = name_in_trackers(Path(self.args.run_dir), str(self.args.run_name), step)
        self.guarded.begin_run(Path(self.args.run_dir), self.args.process_index)
        if self.is_world_process_zero() and step == 0:
            self.save_attributions(step)
        wait_for_processes(self.model)

    def drop_unfinished_step(self) -> None:
        """Forget what an interrupted step has read and counted; its teacher had other weights than the one of the checkpoint."""
        self.teacher.forget()
        self.teacher.rendered.clear()
        self.teacher.take_metrics()
        metrics_of(self.rollout_engine)
        self.guarded.take_counts()
        for limit in self.limits.values():
            limit.halved = 0

    def preflight(self) -> Preflight:
        """What can be known before the first step: findings with fixes, the memory estimate, what was chosen for the device."""
        return check(self.setup)

    def train(self, *args: Any, preflight: bool | None = None, **kwargs: Any) -> Any:
        """Train, or resume from a checkpoint.

        Args:
            resume_from_checkpoint: None or "auto" resumes from the newest complete checkpoint of the run directory, if there is one;
                True requires one; a path names one; False starts over and replaces the run.
            allow_changes: settings (and `train_data`, `eval_data`, `base_model`, `tokenizer`, `world_size`, `teacher_weights`,
                `judge_file`) that may differ from those of the checkpoint, by name; the new values apply from there on.
            preflight: log the errors and warnings of a preflight first, which takes seconds; by default unless `args.disable_tqdm`.

        Returns:
            `transformers.trainer_utils.TrainOutput`.

        Raises:
            CheckpointError (a ValueError): no complete checkpoint, or one of another run; lists what differs.
            RunDirectoryError (a ValueError): another process trains in the run directory, it holds other files in the place of the
                run's, or it is removed while the run trains.
            OutOfMemory (a ValueError): the smallest batch does not fit; names the options to change.
            RolloutError, JudgeError (OSErrors): vLLM or the judge failed; the run resumes from its last checkpoint.
            ValueError: weights or optimizer state are not finite after a step; or this trainer has trained, and would start again.
            TypeError: `resume_from_checkpoint` is none of these.
        """
        if self.console_report is not None if preflight is None else preflight:
            for finding in self.preflight().of("error", "warning"):
                logger.log(logging.WARNING if self.is_world_process_zero() else logging.DEBUG, "%s", finding)
        if isinstance(self.rollout_engine, VLLMServerEngine):
            self.rollout_engine.close()  # adapters of an evaluation, in the folder that the run begins with
        failed = True
        try:
            result = super().train(*args, **kwargs)
            failed = False
            return result
        finally:
            for tracker in self.trackers:
                tracker.end(failed)
            if self.console_report is not None:
                self.console_report.stop()
            for engine in (self.rollout_engine, self.eval_engine):
                close(engine)

    def end_run(self) -> None:
        """Write `adapter/`, which plain PEFT loads, the model card, and the last attribution."""
        folder = Path(self.args.run_dir)
        if self.sharded:
            with written_whole(folder / "adapter") if self.args.should_save else nullcontext(folder / "adapter") as unfinished:
                self.save_model(str(unfinished), _internal_call=True)
        elif self.is_world_process_zero():
            self.check_state()
            self.write_at_the_end(self.write_adapter, folder / "adapter")
        if self.run_log is not None:
            self.write_at_the_end(self.write_card, folder / "README.md")
            self.save_attributions(self.state.global_step)
            if self.args.push_to_hub:
                self.push(folder / "adapter")
        wait_for_processes(self.model)

    def write_adapter(self, target: Path) -> None:
        with written_whole(target) as unfinished:
            self._save(str(unfinished))

    def write_card(self, target: Path) -> None:
        """Write the model card and the rows that wait for room on the disk."""
        assert self.run_log is not None
        self.run_log.sync()
        write_text(target, self.card())

    def rollout_rows(self, rollouts: Sequence[Rollout], step: int, trained: Sequence[Rollout] = ()) -> list[dict[str, Any]]:
        """These rollouts as rows of the log.

        Args:
            trained: those among them that enter the loss.
        """
        rows = []
        for rollout in rollouts:
            prompt = shown_prompt(self.task, self.encoder, rollout.example)
            rows.append(rollout_row(rollout, step, prompt, rollout in trained))
        return rows

    def save_attributions(self, step: int) -> None:
        """Save, for the report, what the feedback does to the tokens of some wrong answers. The run does not depend on it.

        Answers to eight times as many held-out problems are sampled; the first wrong ones are saved. A failure is logged.
        """
        args, count = self.args, self.args.attribution_examples
        if not count or self.run_log is None:
            return
        state = random_state()  # a task may draw from it
        try:
            examples = self.eval_examples[: 8 * count]
            if not self.own_eval_examples:
                examples = self.task.examples(args.eval_split, 8 * count, args.eval_subset_seed, args.data_dir)
            show = partial(self.on_progress, "answers to attribute", total=len(examples))
            with getattr(self.rollout_engine, "returning_memory", nullcontext)():  # training has fewer prompts at once
                rollouts, _ = answer_examples(
                    self.rollout_engine, self.task, self.encoder, examples, args.sampling, args.budget, args.seed, show
                )
            inspector = Inspector(args, self.model, self.teacher, self.head, self.encoder)
            if records := inspector.wrong_answers(rollouts, count, partial(self.on_progress, "attribution", total=count)):
                save_attribution(records, Path(args.run_dir), step)
        except (ValueError, OSError) as error:  # a task's data, memory, the disk
            logger.error("the attribution of step %d is missing (%s); the run does not depend on it", step, error)
        self.teacher.take_metrics()  # not of a training step
        self.guarded.take_counts()
        restore_random_state(state)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Adapter and tokenizer. Embeddings are never trained here, so PEFT need not ask the hub whether they have grown."""
        if self.args.should_save:
            assert output_dir is not None  # `save_model` names the run directory itself
            state_dict = state_dict or trained_parameters(self.model)
            self.model.save_pretrained(output_dir, state_dict=state_dict, save_embedding_layers=False)
            self.processing_class.save_pretrained(output_dir)
            write_text(Path(output_dir) / "README.md", self.card())  # in place of peft's template

    def card(self) -> str:
        return model_card(self.args, Path(self.args.run_dir), unwrap(self.model).config._name_or_path, self.state.global_step)

    @property
    def decided(self) -> list[str]:
        return [*self.setup.decided, *(["vllm_weights"] if "rollouts" in self.setup.decided else [])]

    def adopt(self, settings: Mapping[str, Any]) -> None:
        chosen = settings.get("rollouts")
        if "rollouts" in self.setup.decided and chosen in ("hf", "vllm") and chosen != self.args.rollouts:
            self.args.rollouts, self.args.vllm_weights = chosen, settings.get("vllm_weights", self.args.vllm_weights)
            self.setup.decided["rollouts"] = f"{chosen}: that of the checkpoint"
            for engine in (self.rollout_engine, self.eval_engine):
                close(engine)
            self.rollout_engine, self.eval_engine = load_engines(self.model, self.setup.tokenizer, self.args, self.limits)
        for name in ("merge_adapter", "gradient_checkpointing"):
            if name in self.setup.decided and isinstance(value := settings.get(name), bool):
                setattr(self.args, name, value)
        self.args.activation_checkpointing = self.args.gradient_checkpointing
        for engine in (self.rollout_engine, self.eval_engine):
            if isinstance(engine, HFRolloutEngine):
                engine.merge_adapter = None if self.args.merge_adapter else False

    def save_extra(self, folder: Path) -> None:
        self.teacher.weights.save(folder)
        (folder / COUNTERS).write_text(json.dumps(self.counters), encoding="utf-8")
        save_state(self.objective.state(), folder, "method")
        assert self.run_log is not None  # the main process has opened it
        self.run_log.sync()

    def settle(self) -> None:
        super().settle()
        self._method_state = copy.deepcopy(self.objective.state())

    def restore_settled(self) -> None:
        super().restore_settled()
        self.objective.load_state(self._method_state)

    def load_extra(self, folder: Path) -> None:
        self.teacher.weights.load(folder)
        stored = read_json(folder / COUNTERS, CheckpointError)
        self.counters |= {name: stored[name] for name in self.counters if type(stored.get(name)) in (int, float)}
        self.objective.load_state(load_state(folder, "method"))

    # ---- What transformers.Trainer would do to tensors -----------------------------------------------------------------------

    def _prepare_inputs(self, inputs: list[tuple[Rollout, Any]]) -> list[tuple[Rollout, Any]]:  # type: ignore[override]
        return inputs

    def floating_point_ops(self, inputs: list[tuple[Rollout, Any]]) -> int:  # type: ignore[override]
        return 0

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(cast(Sized, train_dataset) if train_dataset is not None else self.train_dataset)


class StepCallbacks(TrainerCallback):
    """What follows an optimizer update and a step."""

    def __init__(self, trainer: SelfDistillTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # a resumed run has the intervals of its checkpoint otherwise

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Nothing follows an update that is skipped."""
        if not self.trainer.record.skipped:
            self.trainer.end_update()

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.finish_step()


def pair(found: Any, name: str, kind: Any, method: str) -> Any:
    """What a method's function returned, which must be a value of this kind and metrics."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], kind) and isinstance(found[1], Metrics)):
        raise ValueError(
            f"{name} of method {method} returned a {type(found).__name__}, expected a pair of a {kind.__name__} and Metrics"
        )
    return found


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimizer that the caller made holds no parameter that is trained."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(id(parameter) for parameter in model.parameters() if parameter.requires_grad):
        raise ValueError(
            "the optimizer holds none of the adapter's parameters: pass a model that has its adapter already (get_peft_model), and an "
            "optimizer of those of its parameters that require gradients"
        )


def take_rate(args: SelfDistillConfig, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that the caller made has a rate of its own, which is the run's peak rate then."""
    # A schedule, which may have lowered "lr" for its warm-up, keeps the rate that it was given.
    rate = float(max(group.get("initial_lr", group["lr"]) for group in optimizer.param_groups))
    if rate != args.learning_rate:
        logger.warning("learning_rate is that of the optimizer, %g, not %g", rate, args.learning_rate)
        args.learning_rate = rate
