"""Models with random weights, prompts of a given length, and trainers whose steps can be measured."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, TrainerCallback

from firedistill.benchmarks import fire_head
from firedistill.benchmarks.gpu.sizes import Setting, Shape, Sizes
from firedistill.benchmarks.prescribed import PrescribedTask, student_states, word_tokenizer, words
from firedistill.config import SelfDistillConfig
from firedistill.prompts import PromptEncoder, student_messages
from firedistill.rollout import Response, Rollout, Sampling
from firedistill.tasks import Example, FeedbackField, Verdict
from firedistill.trainer import SelfDistillTrainer

LOGIT_DEVIATION = 8.0  # of the random models: the 128 best of 150,000 tokens have nearly all of the probability
CONTEXT_SHARE = 0.01  # of the usual output of attention: most tokens are inside the radius then
FREE = 1e-12  # a learning rate that leaves a model as it is
LENGTHS = (1.0, 0.8, 1.2, 0.9, 1.1, 0.85, 1.15, 1.0)  # of prompts, in turn: each batch has a shape of its own, as in training


def random_model(shape: Shape, device: str) -> PreTrainedModel:
    """A Qwen2 model in bfloat16 whose random weights are drawn on the device, with a head of its own.

    Its distributions are about as peaked as those of trained models, and differ about as much with and without feedback: top-p
    sampling and the radius depend on both.
    """
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.self_attn.o_proj.weight.mul_(CONTEXT_SHARE)
        deviation = model.get_output_embeddings().weight[:4096].float().std()
        model.base_model.norm.weight.fill_(LOGIT_DEVIATION / (float(deviation) * math.sqrt(shape.hidden)))
    return model.eval()


class GPUTask(PrescribedTask):
    """Prompts of about a given number of tokens; every second response that is judged is wrong, whatever it says."""

    name = "bench"

    def __init__(self, sizes: Sizes, tokenizer: PreTrainedTokenizerBase):
        super().__init__(sizes.fields)
        self.verdicts = cycle((True, False))
        encoder = PromptEncoder(tokenizer)
        empty, hundred = (len(encoder.encode(student_messages(self, Example("", text, "")))) for text in ("", words(100)))
        self.words = max(1, round((sizes.prompt - empty) * 100 / (hundred - empty)))

    def examples(self, split: str, n: int | None = None, seed: int = 0, data_dir: str | None = None) -> list[Example]:
        counts = [round(share * self.words) for _, share in zip(range(n or 64), cycle(LENGTHS), strict=False)]
        return [Example(f"bench/{split}/{i}", words(count, seed=i), "unknown") for i, count in enumerate(counts)]

    def verify(self, example: Example, response: str) -> Verdict:
        return Verdict(next(self.verdicts), None, example.answer, well_formed=True)


class PrescribedEngine:
    """A rollout engine that returns random tokens at once."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seed: int, *more: Any, **others: Any
    ) -> list[Response]:
        draw = torch.Generator().manual_seed(seed)
        drawn = torch.randint(3, self.vocabulary, (len(prompts), sampling.max_new_tokens), generator=draw)
        return [Response(ids, "", True) for ids in drawn.tolist()]


class MeasuredTrainer(SelfDistillTrainer):
    """A trainer that leaves the model as it is, keeps the rows of its steps, and chooses the radius in its first step.

    Attributes:
        over: share of the tokens of wrong responses that shall be over the radius; None leaves the radius alone.
        rows: of the steps, as in `metrics.jsonl`.
    """

    over: float | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rows: list[dict[str, Any]] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        wrong = [rollout for rollout, _ in inputs if not rollout.verdict.correct]
        if self.over is not None and wrong:
            with torch.no_grad():
                ours = student_states(model, wrong).hidden
                excess = fire_head.gradient_excess(self.head, ours, self.teacher.full(wrong).hidden)
            self.record.step_scale = self.args.step_scale = fire_head.step_scale_for(self.over, excess)
            self.over = None
        return super().compute_loss(model, inputs, *args, **kwargs)

    def finish_step(self) -> None:
        super().finish_step()
        self.rows.append(self.last_metrics)


class EveryStep(TrainerCallback):
    """Calls `before(step)` and `after(step)` of every step, counted from 0."""

    def __init__(self, before: Callable[[int], None] | None = None, after: Callable[[int], None] | None = None):
        self.before, self.after = before, after

    def on_step_begin(self, args, state, control, **kwargs):
        if self.before is not None:
            self.before(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if self.after is not None:
            self.after(state.global_step - 1)


@contextmanager
def trainer_of(
    setting: Setting,
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    callback: EveryStep | None = None,
    **settings: Any,
) -> Iterator[MeasuredTrainer]:
    """A trainer of the benchmark's task in a folder of its own, with the package's defaults and these settings.

    Args:
        model: a model, or the name of one with its tokenizer.
    """
    sizes = setting.sizes
    task = GPUTask(sizes, tokenizer if tokenizer is not None else word_tokenizer())
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "output_dir": str(Path(folder) / "run"),
            "max_new_tokens": sizes.response,
            "max_steps": sizes.warm_up_steps + sizes.steps,
            "per_device_train_batch_size": sizes.prompts,
            "learning_rate": FREE,
            "warmup_steps": 0,
            "lr_scheduler_type": "constant",
            "eval_size": 0,
            "log_rollouts": False,
            "save_strategy": "no",
            "use_cpu": not setting.is_gpu,
        }
        name = {"model": model} if isinstance(model, str) else {}
        yield MeasuredTrainer(
            model=None if name else model,
            args=SelfDistillConfig(**given | name | settings),
            task=task,
            processing_class=None if name else (tokenizer or word_tokenizer()),
            callbacks=[callback] if callback else None,
        )


def wrong_rollouts(trainer: SelfDistillTrainer, count: int, response: int) -> list[Rollout]:
    """Wrong responses of random tokens with the feedback of the task."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for example in trainer.setup.train_examples[:count]:
        ids = torch.randint(3, trainer.head.vocabulary_size, (response,), generator=draw).tolist()
        verdict = Verdict(False, None, example.answer)
        feedback: tuple[FeedbackField, ...] = trainer.task.feedback(example, "", verdict)
        prompt = trainer.encoder.encode(student_messages(trainer.task, example))
        found.append(Rollout(example, prompt, Response(ids, "", True), verdict, feedback))
    return found
