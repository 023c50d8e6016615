"""Algorithm 1 on `transformers.Trainer` (`resumable.py` adds exact continuation to it).

One optimizer step, from top to bottom: `get_batch_samples` (sample, judge, build feedback), `compute_loss` (score with student and
teacher, apply the objective), the optimizer step, then the EMA update (`TeacherUpdate`). What differs from method to method lives in
`firedistill.objectives`; this file knows none of them.
"""

from __future__ import annotations

import json
import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_callback import PrinterCallback

from firedistill.cli.inspect import save_wrong_answers
from firedistill.config import SelfDistillConfig
from firedistill.evaluation import answer_examples, fitting_prompts, summarise
from firedistill.files import written_whole
from firedistill.memory import SHORTER_CONTEXTS, SMALLER_MICRO_BATCHES, SMALLER_ROLLOUTS, explained_memory, in_smaller_pieces
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora, load_adapter
from firedistill.models.states import ResponseStates, last_hidden_states, score_responses, unwrap
from firedistill.objectives import Averages, Objective, StepBatch, TrainingBatch, load_objective
from firedistill.ops import Head
from firedistill.prompts import PromptEncoder, View, fit_feedback, student_messages, teacher_messages
from firedistill.rollouts.engine import Rollout, RolloutEngine
from firedistill.rollouts.hf import HFRolloutEngine, inference_mode
from firedistill.rollouts.sampler import Sampler
from firedistill.run.checkpoints import load_state, random_state, restore_random_state, save_state
from firedistill.run.identity import identity, model_fingerprint
from firedistill.run.log import RunLog, read_jsonl, rollout_row
from firedistill.run.resume import ResumableTrainer, read_json
from firedistill.run.trackers import guard_trackers
from firedistill.tasks import Example, Task, load_task
from firedistill.tasks.guard import GuardedTask, TaskFault
from firedistill.teacher.ema import EMATeacher
from firedistill.teacher.prefix_cache import ViewScorer

logger = logging.getLogger(__name__)

COUNTERS = "firedistill_counters.json"


@dataclass
class StepLog:
    """What happens within one optimizer step, for its row in `metrics.jsonl`."""

    learning_rate: float
    step_scale: float
    started: float
    prompts: int = 0
    averages: Averages = field(default_factory=Averages)
    sums: dict[str, float] = field(default_factory=dict)
    loss: float | Tensor = 0.0
    grad_norms: list[float] = field(default_factory=list)
    trained_rollouts: int = 0
    uids: list[str] = field(default_factory=list)
    skipped: bool = False
    skipped_updates: int = 0

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount


@dataclass
class Update:
    """The rollouts of this process that serve one optimizer update.

    Attributes:
        prompts: prompts of the update over all processes, those included that were left out.
        trained_rollouts: rollouts of the update over all processes.
    """

    rollouts: list[Rollout]
    prompts: int
    trained_rollouts: int


class TrainingOrder(Dataset):
    """The examples in the order of training: one seeded shuffle, consumed in order, reshuffled at the end.

    Item i is a function of the seed alone, so that a resumed run goes on where it stopped.
    """

    def __init__(self, examples: Sequence[Example], length: int, seed: int):
        self.examples, self.length, self.seed = examples, length, seed
        self._round = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        shuffle, position = divmod(index, len(self.examples))
        if shuffle != self._round:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + shuffle)
            self._round, self._order = shuffle, torch.randperm(len(self.examples), generator=generator).tolist()
        return self.examples[self._order[position]]


class SelfDistillTrainer(ResumableTrainer):
    """Feedback-based on-policy self-distillation.

    Args:
        model: a causal language model or its name; `args.model` is loaded if not given. It gets a LoRA adapter unless it already
            has trainable adapter weights (`args.initial_adapter` continues from a saved one).
        args: the settings.
        task: a task or its name; `args.task` if not given.
        train_examples, eval_examples: taken from the task if not given.
        processing_class: the tokenizer; required with a model object.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ValueError: settings, model, tokenizer or task do not fit together; the message says what to change.
    """

    train_dataset: TrainingOrder  # which Trainer declares more widely

    # The loss is already divided by the number of prompts over all micro-batches.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | str | None = None,
        args: SelfDistillConfig | None = None,
        task: Task | str | None = None,
        train_examples: Sequence[Example] | None = None,
        eval_examples: Sequence[Example] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        args = args or SelfDistillConfig()
        self.task = task if isinstance(task, Task) else load_task(task or args.task)
        self.judge = cast(Task, GuardedTask(self.task, args.task_timeout))  # a task in all but its class
        self.objective: Objective = load_objective(args.method, args.method_settings)
        if model is None or isinstance(model, str):
            model, processing_class = load_model_and_tokenizer(
                model or args.model, dtype=args.model_dtype, quantization=args.quantization
            )
        if processing_class is None:
            raise ValueError("a model object needs its tokenizer: pass processing_class=...")
        if args.checkpoint_sampling:
            args.top_k = model.generation_config.top_k or 0
            args.repetition_penalty = model.generation_config.repetition_penalty or 1.0
        if args.n_gpu > 1:
            logger.warning(
                "one process uses one GPU; for %d GPUs start with: torchrun --nproc_per_node %d", args.n_gpu, args.n_gpu
            )
            args._n_gpu = 1
        if not hasattr(model, "peft_config"):
            torch.manual_seed(args.seed)  # here, whatever loading drew: the seed alone decides the adapter's start
            model = trainable_adapter(cast(PreTrainedModel, model), args)

        if train_examples is None:
            train_examples = self.task.examples("train", args.train_size, args.seed, args.data_dir)
        if eval_examples is None:
            eval_examples = (
                self.task.examples("eval", args.eval_size, args.eval_subset_seed, args.data_dir) if args.eval_size else []
            )
        if not train_examples:
            raise ValueError(f"task {self.task.name!r} has no training examples")
        if not eval_examples:
            args.eval_strategy, args.eval_on_start = "no", False
        self.eval_examples = list(eval_examples)

        self.encoder = PromptEncoder(processing_class)
        self.prompts_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        super().__init__(
            model=model,
            args=args,
            data_collator=list,
            train_dataset=TrainingOrder(train_examples, args.max_steps * self.prompts_per_step, args.seed),
            eval_dataset=self.eval_examples or None,
            processing_class=processing_class,
            callbacks=[TeacherUpdate(self), StepReport(self), *(callbacks or [])],
            optimizers=optimizers,
        )
        if self.is_fsdp_enabled or is_deepspeed_zero3_enabled():
            raise ValueError(
                "FSDP and ZeRO-3 are not supported: the EMA teacher and the head read whole weights. Every process needs a whole base "
                "model: use DDP (torchrun), quantization nf4 for large ones, or DeepSpeed up to ZeRO-2"
            )
        self.model_accepts_loss_kwargs = True  # what transformers 5.16 asks instead of loss_is_scaled_for_ga
        for unwanted in (ProgressCallback, PrinterCallback):
            self.remove_callback(unwanted)
        self.trackers = guard_trackers(self.callback_handler.callbacks)

        self.teacher = EMATeacher(self.model, args.ema_rate)
        self.head = Head.of(unwrap(self.model), temperature=args.score_temperature)
        check_head(self.model, self.head)
        self.rollout_engine: RolloutEngine = HFRolloutEngine(self.model, processing_class, args.rollout_batch_size)
        self.eval_engine: RolloutEngine = HFRolloutEngine(self.model, processing_class, args.eval_batch_size)
        share_prefixes = args.share_prefixes if args.share_prefixes is not None else args.device.type == "cpu"
        self.view_scorer = ViewScorer(self.model, share_prefixes, args.score_tokens_per_forward)
        self.run_log: RunLog | None = None  # made when training starts: looking at a model leaves no folder behind
        self.step_log: StepLog  # of the step that goes on; there is none before the first one
        self.last_metrics: dict[str, Any] = {}
        self._identity: dict[str, Any] | None = None
        self.counters = {"cumulative_generated_tokens": 0, "cumulative_train_seconds": 0.0, "skipped_updates": 0}
        # Told (phase, done, total) while a step goes on; the command line shows a bar.
        self.on_progress = lambda phase, done, total: None

    # ---- Algorithm 1, line by line -------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[Example]], num_batches: int, device: torch.device
    ) -> tuple[list[list[Rollout]], int]:
        """Lines 1 to 2 and 9: the prompts of one step, sampled in one go, judged, with feedback, cut into micro-batches."""
        examples = [example for batch in islice(epoch_iterator, num_batches) for example in batch]
        self.take_random_state()
        learning_rate = self.optimizer.param_groups[0]["lr"]
        nominal = self.args.nominal_learning_rate or self.args.learning_rate
        self.step_log = StepLog(learning_rate, max(1.0, learning_rate / nominal), started=time.perf_counter())

        with self.timed("seconds_rollout"):
            rollouts, over_budget = self.sample(examples)
        self.report_rollouts(rollouts, len(over_budget))
        trained = [rollout for rollout in rollouts if self.enters_training(rollout)]
        if self.run_log is not None and self.args.log_rollouts:
            self.run_log.rollouts(
                self.state.global_step + 1,
                [
                    rollout_row(
                        r, self.state.global_step + 1, self.encoder.render(student_messages(self.task, r.example)), r in trained
                    )
                    for r in rollouts
                ],
            )
        self.objective.prepare(self.step_batch(trained))
        self.view_scorer.forget()
        *earlier, last = self.updates(trained)
        for update in earlier:
            self.update(update, num_batches)
        self.begin_update(last)
        return self.micro_batches(last.rollouts, num_batches), self.prompts_per_step

    # Trainer declares batches of tensors; here a batch is a list of rollouts, and of examples in an evaluation.

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: list[Rollout], return_outputs: bool = False, num_items_in_batch: int | None = None
    ) -> Tensor:
        """Lines 3 to 17: score with the live student and, where the objective asks, with the EMA teacher; the loss over N."""
        rollouts = inputs
        self.step_log.uids += [rollout.example.uid for rollout in rollouts]
        if not rollouts:
            # Every rank and micro-batch takes part in the backward pass, with a gradient of zero.
            return 0.0 * last_hidden_states(model, torch.zeros((1, 1), dtype=torch.long, device=self.args.device)).float().sum()
        student = score_responses(model, [r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts])
        batch = TrainingBatch(
            rollouts=rollouts,
            student=student,
            head=self.head,
            teacher_head=self.teacher_head(),
            teacher=lambda rows, views, lengths=None: self.score_views([rollouts[row] for row in rows], views, lengths),
            saved=lambda rows, views: self.step_log.add(
                teacher_tokens_saved=sum(self.view_tokens(rollouts[row], view) for row in rows for view in views)
            ),
            responses=self.step_log.prompts * self.objective.group_size,
            prompts=self.step_log.prompts,
            progress=self.progress,
            step_scale=self.step_log.step_scale,
            log_prob_floor=self.args.log_prob_floor,
            averages=self.step_log.averages,
        )
        # Distributed wrappers average the gradient over processes; the shares of all of them are to be added up.
        loss = self.objective.loss(batch) * self.args.world_size
        self.view_scorer.forget()
        self.step_log.loss += loss.detach()
        return loss

    def sample(self, examples: Sequence[Example]) -> tuple[list[Rollout], list[Example]]:
        """The objective's rollouts, judged, and the examples whose prompt is over the budget."""
        law = self.objective.sampling(self.args.sampling)
        first_index = self.args.process_index * len(examples)
        prompts, over_budget = fitting_prompts(self.task, self.encoder, examples, law, self.args.budget, first_index)

        def attempt() -> list[Rollout]:
            sampler = Sampler(
                self.rollout_engine,
                self.judge,
                self.encoder,
                law,
                self.args.budget,
                self.teacher.applied,
                self.sampling_seed(),
                progress=lambda done: self.on_progress("rollouts", done, len(prompts) * self.objective.group_size),
            )
            return self.objective.sample(sampler, prompts, self.progress)

        def shrink() -> bool:
            return not self.sharded and self.halve(self.rollout_engine, "batch_size")

        return in_smaller_pieces(attempt, shrink, SMALLER_ROLLOUTS), over_budget

    def step_batch(self, rollouts: list[Rollout]) -> StepBatch:
        """What the objective may ask about the whole step before the first gradient."""

        def student(rollouts: Sequence[Rollout]) -> ResponseStates:
            prompts, responses = [r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts]
            with self.timed("seconds_score"), inference_mode(self.model):
                return self.score_in_pieces(
                    lambda: score_responses(self.model, prompts, responses, max_tokens=self.view_scorer.max_tokens)
                )

        return StepBatch(
            rollouts=rollouts,
            prompts=self.prompts_per_step,
            progress=self.progress,
            seed=self.sampling_seed() ^ 0x5EED5EED,  # low bits: generators on a CPU ignore those above 32
            student=student,
            teacher=lambda rollouts, views: self.score_views(rollouts, views, keep=True),
            head=self.head,
            teacher_head=self.teacher_head(),
            total=lambda value: sum(gather_object([value])),
            largest=lambda value: max(gather_object([value])),
            averages=self.step_log.averages,
        )

    @property
    def progress(self) -> float:
        """How far training is: 0 at the first step, 1 at the last."""
        return self.state.global_step / max(self.state.max_steps - 1, 1)

    def micro_batches(self, rollouts: Sequence[Rollout], count: int) -> list[list[Rollout]]:
        """Rollouts of similar length share a micro-batch: less padding, and the loss does not depend on the split.

        Where few rollouts train, the first micro-batches are as full as in a whole step and the last ones empty.
        """
        ordered = sorted(rollouts, key=lambda rollout: len(rollout.prompt_ids) + len(rollout.response_ids))
        size = max(math.ceil(len(ordered) / count), self.args.per_device_train_batch_size * self.objective.group_size)
        return [ordered[i * size : (i + 1) * size] for i in range(count)]

    def updates(self, rollouts: list[Rollout]) -> list[Update]:
        """Which rollouts serve each optimizer update, this process's share; one update unless the objective wants several.

        Updates without a rollout are left out, except for the last one of a step that has none at all.
        """
        draw = random.Random(f"{self.args.seed} {self.state.global_step}")
        plan = self.objective.updates(range(self.prompts_per_step), draw)
        if len(plan) == 1:
            return [Update(rollouts, self.prompts_per_step, sum(gather_object([len(rollouts)])))]
        # A small update is shared out again, or all but one process would idle.
        for rollout in rollouts:
            rollout.teacher_states.clear()
        everyone = gather_object(rollouts)
        members = [[rollout for rollout in everyone if rollout.prompt_index in prompts] for prompts in plan]
        updates = [
            Update(group[self.args.process_index :: self.args.world_size], len(prompts), len(group))
            for prompts, group in zip(plan, members, strict=True)
            if group
        ]
        return updates or [Update([], self.prompts_per_step, 0)]

    def begin_update(self, update: Update) -> None:
        self.step_log.prompts, self.step_log.trained_rollouts = update.prompts, update.trained_rollouts
        self.step_log.skipped = False

    def update(self, update: Update, num_batches: int) -> None:
        """An optimizer and EMA update that is not the last one of its step; the last one is the inherited loop's."""
        self.begin_update(update)
        model, micro_batches = self.model_wrapped, self.micro_batches(update.rollouts, num_batches)
        for position, rollouts in enumerate(micro_batches, start=1):
            last = position == len(micro_batches)
            self.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else self.accelerator.no_sync(model):
                self.training_step(model, rollouts, self.prompts_per_step)
        self._get_grad_norm(model, self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None)
        self.optimizer.step()
        if not self.step_log.skipped:
            self.teacher.update()
        model.zero_grad()

    def teacher_head(self) -> Head:
        """The head under the teacher's weights; the student's own unless the head is trained."""
        return Head.of(unwrap(self.model), self.args.score_temperature, self.teacher.values_for(self.head.projection))

    # ---- Rollouts and views --------------------------------------------------------------------------------------------------

    def enters_training(self, rollout: Rollout) -> bool:
        """Whether a rollout reaches the loss; builds its feedback where the objective wants a teacher."""
        if not rollout.response_ids or rollout.verdict.failed:
            self.step_log.add(**{"failed_verdicts" if rollout.verdict.failed else "empty_responses": 1})
            return False
        if not self.objective.trains(rollout):
            return False
        if self.args.drop_unfinished_rollouts and not (rollout.response.finished and rollout.verdict.well_formed):
            self.step_log.add(dropped_unfinished=1)
            return False
        if not self.objective.needs_teacher(rollout):
            return True
        try:
            feedback = self.judge.feedback(rollout.example, rollout.response.text, rollout.verdict)
        except TaskFault as fault:
            logger.warning("%s; the response is left out of training", fault)
            self.step_log.add(failed_feedback=1)
            return False
        rollout.feedback, cut = fit_feedback(feedback, self.encoder, self.args.max_feedback_tokens)
        if cut:
            self.step_log.add(cut_feedback_fields=len(cut))
            logger.warning(
                "%s: feedback over %d tokens; cut: %s", rollout.example.uid, self.args.max_feedback_tokens, ", ".join(cut)
            )
        if self.view_tokens(rollout, "full") > self.args.max_context_tokens:
            self.step_log.add(skipped_over_budget=1)
            logger.warning("%s left out: its teacher view is longer than max_context_tokens", rollout.example.uid)
            return False
        return True

    def view_ids(self, rollout: Rollout, view: View) -> list[int]:
        """Token ids of the teacher's prompt under a view; tokenised once."""
        if view not in rollout.view_ids:
            messages = teacher_messages(self.task, rollout.example, rollout.feedback, view)
            rollout.view_ids[view] = self.encoder.encode(messages)
        return rollout.view_ids[view]

    def view_tokens(self, rollout: Rollout, view: View) -> int:
        return len(self.view_ids(rollout, view)) + len(rollout.response_ids)

    def score_views(
        self, rollouts: Sequence[Rollout], views: Sequence[View], lengths: Sequence[int] | None = None, keep: bool = False
    ) -> list[ResponseStates]:
        """The EMA teacher's hidden states at the responses, one `ResponseStates` per view; without gradient.

        Args:
            lengths: how many tokens of each response to read; all if not given.
            keep: the states stay with the rollouts, and the same views are not scored again within the step.
        """
        lengths = list(lengths) if lengths is not None else [len(rollout.response_ids) for rollout in rollouts]
        if not rollouts:
            width = unwrap(self.model).config.get_text_config().hidden_size
            return [ResponseStates(torch.empty(0, width, device=self.args.device), []) for _ in views]
        if all(view in rollout.teacher_states for rollout in rollouts for view in views):
            kept = [[r.teacher_states[view][:length] for r, length in zip(rollouts, lengths, strict=True)] for view in views]
            return [ResponseStates(torch.cat(states), lengths) for states in kept]
        prompts = [[self.view_ids(rollout, view) for rollout in rollouts] for view in views]
        responses = [rollout.response_ids[:length] for rollout, length in zip(rollouts, lengths, strict=True)]
        before = self.view_scorer.tokens
        keys = [id(rollout) for rollout in rollouts]
        with self.timed("seconds_score"), self.teacher.applied():
            states = self.score_in_pieces(lambda: self.view_scorer.score(keys, prompts, responses))
        read = self.view_scorer.tokens - before
        asked = sum(self.view_tokens(rollout, view) for rollout in rollouts for view in views)
        self.step_log.add(teacher_tokens=read, teacher_tokens_saved=asked - read)
        if keep:
            for view, found in zip(views, states, strict=True):
                for rollout, hidden in zip(rollouts, found.hidden.split(lengths), strict=True):
                    rollout.teacher_states[view] = hidden
        return states

    def score_in_pieces(self, score: Callable[[], Any]) -> Any:
        """`score()`, with smaller forward passes from now on if memory runs out. Sharded models forward in step: they cannot."""

        def shrink() -> bool:
            self.view_scorer.forget()
            self.view_scorer.share_prefixes = False
            return not self.sharded and self.halve(self.view_scorer, "max_tokens", at_least=64)

        return in_smaller_pieces(score, shrink, SHORTER_CONTEXTS)

    def halve(self, owner: Any, name: str, at_least: int = 1) -> bool:
        """Halve a number of `owner`, for the rest of the run; False if it is as small as it can be."""
        size = getattr(owner, name, None)
        if size is None or size // 2 < at_least:
            return False
        setattr(owner, name, size // 2)
        self.step_log.add(out_of_memory=1)
        logger.warning("out of memory: %s of the %s is %d from now on", name, type(owner).__name__, size // 2)
        return True

    def sampling_seed(self) -> int:
        """A seed per step and rank, so that a resumed run samples what the uninterrupted one would have sampled."""
        return ((self.args.seed * 1_000_003 + self.state.global_step) * 1_009 + self.args.process_index) % 2**63

    # ---- The optimizer step --------------------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """Linear warm-up, then cosine (or constant); no step has rate 0."""
        if self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            kind = getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda done: learning_rate_factor(done + 1, warmup, num_training_steps, kind)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | Tensor | None = None) -> float | Tensor:
        """Called once per update, after clipping: one without trained rollouts, or with a non-finite gradient, is skipped.

        Without gradients the optimizer touches neither weights nor momentum; the schedule advances.
        """
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.step_log.grad_norms.append(float(grad_norm))
        if self.step_log.trained_rollouts == 0 or not math.isfinite(float(grad_norm)):
            self.step_log.skipped = True
            self.step_log.skipped_updates += 1
            self.counters["skipped_updates"] += 1
            if self.step_log.trained_rollouts:
                logger.warning(
                    "step %d: the gradient is not finite, so nothing is updated; trained on: %s",
                    self.state.global_step + 1,
                    ", ".join(dict.fromkeys(self.step_log.uids)),
                )
            self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with explained_memory(SMALLER_MICRO_BATCHES):
            return super().training_step(*args, **kwargs)

    # ---- Evaluation ----------------------------------------------------------------------------------------------------------

    def evaluate(  # type: ignore[override]
        self, eval_dataset: Sequence[Example] | None = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ):
        """Greedy accuracy on the held-out examples; writes a row of `evals.jsonl`."""
        resuming = self._random_state is not None  # an evaluation that the checkpoint's run did not get to
        self.take_random_state()
        examples = list(eval_dataset if eval_dataset is not None else self.eval_examples)
        mine = examples[self.args.process_index :: self.args.world_size]
        rollouts, over_budget = answer_examples(
            self.eval_engine,
            self.judge,
            self.encoder,
            mine,
            self.args.greedy,
            self.args.budget,
            progress=lambda done: self.on_progress("evaluation", done, len(mine)),
        )
        rollouts = gather_object(rollouts)
        summary = summarise(rollouts)
        if skipped := sum(gather_object([len(over_budget)])):
            summary["skipped_over_budget"] = skipped
        step = self.state.global_step
        row = {"step": step, **{k: v for k, v in self.counters.items() if k.startswith("cumulative")}, **summary}
        if self.run_log is not None:
            self.run_log.evaluation(row)
            if self.args.log_rollouts:
                rows = [
                    rollout_row(r, step, self.encoder.render(student_messages(self.task, r.example)), trained=False)
                    for r in rollouts
                ]
                self.run_log.rollouts(step, rows, prefix="eval")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in summary.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.evaluation_due = False
        if resuming:
            self.keep_random_state()
        return metrics

    # ---- The run directory ---------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        if self._identity is None:  # before wrappers shard the base model
            examples, base = self.train_dataset.examples, model_fingerprint(self.model)
            self._identity = identity(self.args.resolved(), examples, self.eval_examples, base, self.args.world_size)
        return self._identity

    def begin_run(self, step: int) -> None:
        """Open the run directory; rows that the run will write again are dropped."""
        self.identity()
        if self.is_world_process_zero():
            self.run_log = RunLog(self.args.run_dir)
            self.run_log.start(step, evaluated=not self.evaluation_due)
            self.args.save_yaml(Path(self.args.run_dir) / "config.yaml")
            if step == 0:
                self.save_attributions(step)

    def end_run(self) -> None:
        """Write `adapter/`, which plain PEFT loads, and the model card."""
        folder = Path(self.args.run_dir)
        if self.run_log is not None:
            self.run_log.sync()
        with written_whole(folder / "adapter") if self.args.should_save else nullcontext(folder / "adapter") as unfinished:
            self.save_model(str(unfinished))
        if self.run_log is not None:
            (folder / "README.md").write_text(model_card(self.args, folder), encoding="utf-8")
            self.save_attributions(self.state.global_step)

    def save_attributions(self, step: int) -> None:
        """For the report: what the feedback does to the tokens of some wrong answers. The run is the same with and without."""
        if self.args.attribution_examples:
            self.on_progress("attribution", 0, self.args.attribution_examples)
            state = random_state()  # a task may draw from it
            save_wrong_answers(self, step)
            restore_random_state(state)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Adapter and tokenizer. Embeddings are never trained here, so PEFT need not ask the hub whether they have grown."""
        if self.args.should_save:
            assert output_dir is not None  # `save_model` names the run directory itself
            self.model.save_pretrained(output_dir, state_dict=state_dict, save_embedding_layers=False)
            self.processing_class.save_pretrained(output_dir)

    def save_extra(self, folder: Path) -> None:
        self.teacher.save(folder)
        (folder / COUNTERS).write_text(json.dumps(self.counters), encoding="utf-8")
        save_state(self.objective.state(), folder, "method")
        assert self.run_log is not None  # the main process has opened it
        self.run_log.sync()

    def load_extra(self, folder: Path) -> None:
        self.teacher.load(folder)
        stored = read_json(folder / COUNTERS)
        self.counters |= {name: stored[name] for name in self.counters if isinstance(stored.get(name), int | float)}
        self.objective.load_state(load_state(folder, "method"))

    # ---- Reports -------------------------------------------------------------------------------------------------------------

    def report_rollouts(self, rollouts: Sequence[Rollout], over_budget: int) -> None:
        self.step_log.add(generated_tokens=sum(rollout.generated_tokens for rollout in rollouts))
        if over_budget:
            self.step_log.add(skipped_over_budget=over_budget)
        for rollout in rollouts:
            if rollout.prefix_length:  # partly the teacher's own answer
                self.step_log.averages.add(
                    guided_correct_rate=float(rollout.verdict.correct), prefix_length=float(rollout.prefix_length)
                )
                continue
            self.step_log.averages.add(
                correct_rate=float(rollout.verdict.correct),
                truncated_rate=float(not rollout.response.finished),
                response_length=float(len(rollout.response_ids)),
                well_formed_rate=float(rollout.verdict.well_formed),
            )

    def finish_step(self) -> None:
        """Reduce the step's log over ranks and write its row."""
        log = self.step_log
        synchronise(self.args.device)
        total = time.perf_counter() - log.started
        log.add(seconds_update=total - log.sums.get("seconds_rollout", 0.0) - log.sums.get("seconds_score", 0.0))
        ranks = gather_object([(log.averages.on_host(), log.sums, float(log.loss))])
        averages = Averages().merge(rank[0] for rank in ranks)
        sums: dict[str, float] = {"teacher_tokens": 0, "teacher_tokens_saved": 0}
        for _, rank_sums, _ in ranks:
            for name, amount in rank_sums.items():
                is_time = name.startswith("seconds")
                sums[name] = max(sums.get(name, 0.0), amount) if is_time else sums.get(name, 0) + int(amount)
        self.counters["cumulative_generated_tokens"] += sums["generated_tokens"]
        self.counters["cumulative_train_seconds"] += total
        self.last_metrics = {
            "step": self.state.global_step,
            "loss": sum(loss for *_, loss in ranks) / len(ranks) / len(log.grad_norms),
            "grad_norm": statistics.fmean(log.grad_norms),
            **({"grad_norm_max": max(log.grad_norms), "updates": len(log.grad_norms)} if len(log.grad_norms) > 1 else {}),
            "learning_rate": log.learning_rate,
            "step_scale": log.step_scale,
            **{name: value for name, value in self.counters.items() if name != "skipped_updates"},
            "train_seconds": total,
            **sums,
            **averages.means(),
            "ema_distance": self.teacher.distance(),
            "skipped_update": log.skipped_updates,
            "skipped_updates": self.counters["skipped_updates"],
            **{name: count for name, count in self.faults().items() if count},
        }
        if self.run_log is not None:
            self.run_log.metrics(self.last_metrics)

    def faults(self) -> dict[str, int]:
        """What went wrong around the run since it was started, without harm to it."""
        return {
            "failed_checkpoints": self.failed_checkpoints,
            "failed_writes": self.run_log.failed_writes if self.run_log is not None else 0,
            "failed_tracker_calls": sum(tracker.failed for tracker in self.trackers),
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.last_metrics.get("step") == self.state.global_step:
            logs = {**self.last_metrics, **logs}
        super().log(logs, start_time)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        synchronise(self.args.device)
        start = time.perf_counter()
        yield
        synchronise(self.args.device)
        self.step_log.add(**{name: time.perf_counter() - start})

    # ---- What transformers.Trainer would do to tensors -----------------------------------------------------------------------

    def _prepare_inputs(self, inputs: list[Rollout]) -> list[Rollout]:  # type: ignore[override]
        return inputs

    def floating_point_ops(self, inputs: list[Rollout]) -> int:  # type: ignore[override]
        return 0

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(cast(Sized, train_dataset) if train_dataset is not None else self.train_dataset)


class TeacherUpdate(TrainerCallback):
    """Line 19: the EMA follows every executed optimizer update."""

    def __init__(self, trainer: SelfDistillTrainer):
        self.trainer = trainer

    def on_optimizer_step(self, args, state, control, **kwargs):
        if not self.trainer.step_log.skipped:
            self.trainer.teacher.update()


class StepReport(TrainerCallback):
    """Writes the step's row; asks for an evaluation after the last step, whatever `eval_steps` is."""

    def __init__(self, trainer: SelfDistillTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # a resumed run has the intervals of its checkpoint otherwise

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.finish_step()
        if state.global_step >= state.max_steps and self.trainer.eval_examples:
            control.should_evaluate = True


def learning_rate_factor(step: int, warmup: int, total: int, kind: str = "cosine") -> float:
    """The rate of step 1, 2, ..., total as a share of the peak: `step / warmup`, then a cosine that reaches 0 at step total + 1."""
    if step <= warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total + 1 - warmup))))


def trainable_adapter(model: PreTrainedModel, args: SelfDistillConfig) -> PeftModel:
    """A new LoRA adapter, or the one that `args.initial_adapter` names."""
    if args.initial_adapter is not None:
        return load_adapter(model, args.initial_adapter)
    return add_lora(
        model, r=args.lora_r, alpha=args.lora_alpha, dropout=args.lora_dropout, target_modules=tuple(args.lora_target_modules)
    )


@torch.no_grad()
def check_head(model: nn.Module, head: Head) -> None:
    """Refuse a model whose own logits are not what `Head` makes of its hidden states.

    Raises:
        ValueError: the model does something to its logits that `Head` does not know.
    """
    ids = torch.tensor([[1, 2, 3]], device=next(model.parameters()).device)
    expected = unwrap(model)(input_ids=ids, use_cache=False).logits.float() / head.temperature
    found = head(last_hidden_states(model, ids)).float()
    if not torch.allclose(expected, found, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(
            f"{type(unwrap(model)).__name__} does something to its logits that firedistill does not reproduce "
            f"(largest difference {float((expected - found).abs().max()):.3g}); please report the model"
        )


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock reads what the work took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def model_card(args: SelfDistillConfig, folder: Path) -> str:
    """A short card: what this adapter is, how it was made, what it scored."""
    evaluations = read_jsonl(folder / "evals.jsonl")
    lines = [
        "---",
        "library_name: peft",
        "tags: [firedistill, self-distillation, lora]",
        "---",
        "",
        f"# {args.model} on {args.task}, {args.method}",
        "",
        f"A LoRA adapter trained by feedback-based on-policy self-distillation (`{args.method}`) with firedistill: "
        f"{args.max_steps} optimizer steps, peak learning rate {args.learning_rate:g}, seed {args.seed}. "
        "`config.yaml` holds every setting and can be trained again.",
        "",
        "| step | accuracy | lenient | well-formed | n |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['step']} | {row['accuracy']:.3f} ± {row['stderr']:.3f} | {row['lenient_accuracy']:.3f} "
        f"| {row['well_formed_rate']:.3f} | {row['n']} |"
        for row in evaluations
    ]
    return "\n".join(lines) + "\n"
