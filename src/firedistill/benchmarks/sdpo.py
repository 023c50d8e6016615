"""A Full Context step against one of `SDPOTrainer` of trl, `distillation_mode="full_logits"`: the same method in both.

Both get the same model, LoRA settings, prompts, responses and micro-batches, and a teacher's prompt of about the same length with the
same feedback; the tokens that each side's teacher reads are in the details. Everything else is each side's own: trl's trainer runs
its `train`, with what it does around a step, and only its sampling is replaced by the given responses.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import TrainerCallback

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, PrescribedSteps, StepSizes, model_of
from firedistill.config import SelfDistillConfig
from firedistill.prompts import student_messages

TITLE = "A Full Context step without sampling, against trl's SDPOTrainer with full logits"
NEEDS = "trl"


@dataclass
class Sizes:
    """
    Attributes:
        step: its micro-batch is replaced by each of `micro_batches`.
        micro_batches: responses per forward and backward pass: trl's logits grow with them.
    """

    step: StepSizes = field(
        default_factory=lambda: StepSizes(
            prompt=150, fields=(60, 100, 145, 190), responses=tuple(range(200, 380, 25)), checkpointing=True
        )
    )
    micro_batches: tuple[int, ...] = (8, 2)
    model: ModelSizes = field(default_factory=ModelSizes)
    repeats: int = 3
    memory: bool = True


SIZES = {
    "full": Sizes(),
    "quick": Sizes(StepSizes(80, (30, 50, 70, 90), (40,) * 4, checkpointing=True), (2,), ModelSizes(4, 256, 8192)),
}


def sweeps(sizes: Sizes) -> dict:
    return {}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    for micro_batch in sizes.micro_batches:
        case = {"micro-batch": micro_batch}
        these = replace(sizes, step=replace(sizes.step, micro_batch=micro_batch))
        sides: dict[str, TrlSteps | OurSteps] = {"trl": TrlSteps(these, options), "full context": OurSteps(these, options)}

        def facts(name: str, sides: dict[str, TrlSteps | OurSteps] = sides) -> dict[str, Any]:
            return sides[name].facts()

        yield from harness.rows(case, sides, options.repeats or sizes.repeats, details=facts)
        for side in sides.values():
            side.stop()
        if sizes.memory:
            for name in sides:  # apart: what one side has freed the other could use
                yield from harness.memory_rows(case, prepare_one, name, these, options)


def prepare_one(name: str, sizes: Sizes, options: harness.Options) -> dict[str, Callable[[], None]]:
    """One side, after its first step, which makes the optimizer's state."""
    sides: dict[str, type[TrlSteps | OurSteps]] = {"trl": TrlSteps, "full context": OurSteps}
    side = sides[name](sizes, options)
    side()
    return {name: side}


class OurSteps:
    def __init__(self, sizes: Sizes, options: harness.Options):
        self.steps = PrescribedSteps(sizes.step, sizes.model, options)

    def __call__(self) -> None:
        self.steps.step("full_context")

    def facts(self) -> dict[str, Any]:
        return {"teacher_tokens": self.steps.trainer.step_log.sums["teacher_tokens"]}

    def stop(self) -> None:
        pass


class TrlSteps:
    """`SDPOTrainer.train()` in a thread that waits after every optimizer step until it is asked for the next one."""

    def __init__(self, sizes: Sizes, options: harness.Options):
        steps = PrescribedSteps(sizes.step, sizes.model, options)  # prompt, feedback and responses
        task, responses = steps.trainer.task, steps.responses
        rows = [
            {
                "prompt": student_messages(task, example),
                "privileged_context": "\n\n".join(f.text for f in task.feedback(example, "", task.verify(example, ""))),
            }
            for example in steps.examples
        ]
        model, tokenizer = model_of(sizes.model, options)
        self.teacher_tokens = 0
        self.trainer = make_trainer(self, model, tokenizer, steps.trainer.args, rows, responses, sizes.step)
        self.wanted, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.stopped = False
        self.error: Exception | None = None
        self.threads = torch.get_num_threads()
        self.thread = threading.Thread(target=self.train, daemon=True)
        self.thread.start()
        self.wait()

    def train(self) -> None:
        torch.set_num_threads(self.threads)  # a new thread has the default
        try:
            self.trainer.train()
        except Exception as error:  # raised again where the step was asked for
            self.error = error
        self.done.release()

    def __call__(self) -> None:
        self.wanted.release()
        self.wait()

    def wait(self) -> None:
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def facts(self) -> dict[str, Any]:
        return {"teacher_tokens": self.teacher_tokens}

    def stop(self) -> None:
        self.stopped = True
        self.wanted.release()
        self.thread.join()


def make_trainer(
    steps: TrlSteps,
    model: torch.nn.Module,
    tokenizer: Any,
    ours: SelfDistillConfig,
    rows: list[dict[str, Any]],
    responses: list[list[int]],
    sizes: StepSizes,
) -> Any:
    """An `SDPOTrainer` whose steps are those of `PrescribedSteps`.

    Raises:
        ValueError: trl 1.16 is not installed.
    """
    try:
        from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
    except ImportError as error:
        raise ValueError('this benchmark compares with trl 1.16: pip install "trl==1.16.0"') from error
    from datasets import Dataset
    from peft import LoraConfig

    class Prescribed(SDPOTrainer):
        def _generate(self, prompt_ids):
            return prompt_ids, responses

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 0:  # the first step, too, begins when it is asked for
                steps.done.release()
                steps.wanted.acquire()

        def on_step_end(self, args, state, control, **kwargs):
            steps.done.release()
            steps.wanted.acquire()
            control.should_training_stop = steps.stopped

        def on_teacher_context_built(self, teacher_attention_mask, **kwargs):
            steps.teacher_tokens = int(teacher_attention_mask.sum())

    config = SDPOConfig(
        output_dir=tempfile.gettempdir(),
        use_cpu=ours.use_cpu,
        bf16=False,  # no autocast: the base is bfloat16 and the factors are float32 on both sides
        per_device_train_batch_size=sizes.micro_batch,
        gradient_accumulation_steps=len(responses) // sizes.micro_batch,
        num_generations=1,
        shuffle_dataset=False,
        gradient_checkpointing=sizes.checkpointing,
        learning_rate=0.0,
        max_steps=1_000_000,
        max_completion_length=max(sizes.responses),
        distillation_mode="full_logits",
        teacher_update_rate=ours.ema_rate,
        include_environment_feedback=True,
        use_successful_as_teacher=False,
        reprompt_template="{prompt}{solution}{feedback}",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    return Prescribed(
        model=model,
        reward_funcs=no_reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Turns()],
        peft_config=LoraConfig(
            r=ours.lora_r,
            lora_alpha=ours.lora_alpha,
            lora_dropout=ours.lora_dropout,
            target_modules=list(ours.lora_target_modules),
        ),
    )


def no_reward(completions: list, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)
