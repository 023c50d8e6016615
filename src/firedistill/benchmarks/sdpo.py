"""A Full Context step compared with a step of trl's `SDPOTrainer` with `distillation_mode="full_logits"`: the same method in both.

Both get the same model, LoRA settings, prompts, responses and micro-batches, and teacher prompts of about the same length with the same
feedback; the details have the tokens that each teacher reads. The rest is each side's own: trl runs its `train`, with everything that
it does around a step, and only its sampling is replaced by the given responses.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import TrainerCallback

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import OWN, ModelSizes, PrescribedSteps, StepSizes, model_of
from firedistill.prompts import student_messages
from firedistill.teacher.ema import EMAWeights

TITLE = "A Full Context step without sampling, against trl's SDPOTrainer with full logits"
NEEDS = "trl"


@dataclass
class Sizes:
    step: StepSizes = StepSizes(150, (60, 100, 145, 190), tuple(range(200, 380, 25)), checkpointing=True)
    micro_batches: tuple[int, ...] = (8, 2)  # each a case, replaces that of `step`; trl's logits grow with it
    model: ModelSizes = ModelSizes()
    repeats: int = 3
    memory: bool = True


SIZES = {
    "full": Sizes(),
    "quick": Sizes(StepSizes(80, (30, 50, 70, 90), (40,) * 4, checkpointing=True), (2,), ModelSizes(4, 256, 8192)),
}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for micro_batch in sizes.micro_batches:
        case, problem = {"micro-batch": micro_batch}, (replace(sizes.step, micro_batch=micro_batch), sizes.model, options)
        trl = TrlSteps(*problem)
        sides: dict[str, Callable[[], int]] = {"trl": trl, "full context": our_steps(*problem)}
        repeats = options.repeats or sizes.repeats
        yield from harness.rows(case, sides, repeats, details=lambda tokens: {"teacher_tokens": tokens})
        trl.stop()
        if sizes.memory:  # each side in its own process: it could use what the other one has freed
            yield from harness.memory_rows(case, after_one_step, "trl", TrlSteps, *problem)
            yield from harness.memory_rows(case, after_one_step, "full context", our_steps, *problem)


def after_one_step(name: str, side: Callable[..., Callable[[], int]], *problem: Any) -> dict[str, Callable[[], int]]:
    """A side whose first step, which creates the optimizer's state, is done."""
    step = side(*problem)
    step()
    return {name: step}


def our_steps(*problem: Any) -> Callable[[], int]:
    """A Full Context step; each call returns the tokens that the teacher has read."""
    steps = PrescribedSteps(*problem)
    return lambda: steps.step("full_context").totals["teacher_tokens"]


class TrlSteps(TrainerCallback):
    """`SDPOTrainer.train()` in a thread that waits for a call before every optimizer step.

    Args:
        sample: sample responses of the longest length instead of taking the given ones.

    Raises:
        ValueError: trl 1.16 is not installed.
    """

    def __init__(self, sizes: StepSizes, model_sizes: ModelSizes, options: harness.Options, sample: bool = False):
        trainer = self.trainer(sizes, model_sizes, options, sample)
        self.requested, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.stopped, self.teacher_tokens = False, 0
        self.error: Exception | None = None
        threading.Thread(target=self.train, args=(trainer, torch.get_num_threads()), daemon=True).start()
        self.wait()

    def __call__(self) -> int:
        self.requested.release()
        self.wait()
        return self.teacher_tokens

    def stop(self) -> None:
        self.stopped = True
        self()

    def wait(self) -> None:
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def train(self, trainer: Any, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread has the default
        try:
            trainer.train()
        except Exception as error:  # `wait` raises it
            self.error = error
        self.done.release()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.done.release()
            self.requested.acquire()

    def on_step_end(self, args, state, control, **kwargs):
        self.done.release()
        self.requested.acquire()
        control.should_training_stop = self.stopped

    def on_teacher_context_built(self, teacher_attention_mask, **kwargs):
        self.teacher_tokens = int(teacher_attention_mask.sum())

    def trainer(self, sizes: StepSizes, model_sizes: ModelSizes, options: harness.Options, sample: bool) -> Any:
        """An `SDPOTrainer` whose steps are those of `PrescribedSteps`."""
        try:
            from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
        except ImportError as error:
            raise ValueError('this benchmark compares with trl 1.16: pip install "trl==1.16.0"') from error
        from datasets import Dataset
        from peft import LoraConfig

        ours = PrescribedSteps(sizes, model_sizes, options)
        teacher, rollouts = ours.teachers[OWN], ours.rollouts_with_feedback()
        lora: Any = ours.model.peft_config["default"]
        model, tokenizer = model_of(model_sizes, options)

        class Prescribed(SDPOTrainer):
            def _generate(self, prompt_ids):
                return prompt_ids, [rollout.response_ids for rollout in rollouts]

        config = SDPOConfig(
            output_dir=tempfile.gettempdir(),
            use_cpu=options.device == "cpu",
            bf16=False,  # no autocast: the base has one type on both sides, and the factors are float32
            per_device_train_batch_size=sizes.micro_batch,
            gradient_accumulation_steps=len(rollouts) // sizes.micro_batch,
            num_generations=1,
            shuffle_dataset=False,
            gradient_checkpointing=sizes.checkpointing,
            learning_rate=0.0,
            max_steps=1_000_000,
            max_completion_length=max(sizes.responses),
            generation_kwargs={"min_new_tokens": max(sizes.responses)},
            distillation_mode="full_logits",
            teacher_update_rate=cast(EMAWeights, teacher.weights).rate,
            include_environment_feedback=True,
            use_successful_as_teacher=False,
            reprompt_template="{prompt}{solution}{feedback}",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        rows = [
            {
                "prompt": student_messages(teacher.task, rollout.example),
                "privileged_context": "\n\n".join(field.text for field in rollout.feedback),
            }
            for rollout in rollouts
        ]
        return (SDPOTrainer if sample else Prescribed)(
            model=model,
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[self],
            peft_config=LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=list(lora.target_modules)),
        )
