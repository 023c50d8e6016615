"""Training steps on prescribed rollouts: no sampling, every response wrong, lengths as wanted.

The work of a step depends on lengths and on which tokens violate the radius, not on what the texts say: prompts and feedback are
common words, responses random tokens. Learning rate 0 makes all repetitions the same step, at the cost of a real one.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from firedistill.benchmarks.fire_head import step_scale_for
from firedistill.benchmarks.harness import Options
from firedistill.config import SelfDistillConfig
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.states import ResponseStates, score_responses, unwrap
from firedistill.objectives import load_objective
from firedistill.ops import Head, fire_head_loss
from firedistill.prompts import student_messages
from firedistill.rollouts.engine import Response, Rollout
from firedistill.tasks import Example, Task, Verdict
from firedistill.tasks.types import FeedbackField
from firedistill.teacher.prefix_cache import ViewScorer
from firedistill.trainer import SelfDistillTrainer, StepLog

# Each is one token of the usual vocabularies, so that texts have about as many tokens as words.
WORDS = ["time", "people", "water", "house", "number", "world", "school", "state", "family"]
TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)


@dataclass
class ModelSizes:
    """The random model that stands in where no real one is named, in bfloat16."""

    layers: int = 8
    width: int = 512
    vocabulary: int = 32_768


@dataclass
class StepSizes:
    """
    Attributes:
        prompt: tokens of a student prompt.
        fields: words of each feedback field.
        responses: tokens of each response.
        micro_batch: responses per forward and backward pass; divides the number of responses.
        checkpointing: recompute activations in the backward pass.
    """

    prompt: int
    fields: tuple[int, ...]
    responses: tuple[int, ...]
    micro_batch: int = 1
    checkpointing: bool = False


class PrescribedTask(Task):
    """Feedback fields of given lengths in words."""

    name = "prescribed"

    def __init__(self, fields: Sequence[int]):
        super().__init__()
        self.fields = fields

    def verify(self, example: Example, response: str) -> Verdict:
        return Verdict(False, None, example.answer)

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        return tuple(FeedbackField(f"field{j}", words(count, seed=f"{example.uid} {j}")) for j, count in enumerate(self.fields))


def words(count: int, seed: int | str = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def random_model(sizes: ModelSizes) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A Llama with random weights, large enough for distributions that are not uniform, and a tokenizer of whole words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.width * 8 // 3,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(1, sizes.width // 64),
        num_key_value_heads=max(1, sizes.width // 128),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps `to` in a decorator without types
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    vocabulary = {word: index for index, word in enumerate([*special, "<|unknown|>", *WORDS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<|unknown|>"
    )
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def model_of(sizes: ModelSizes, options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that the user names, or a random one."""
    return random_model(sizes) if options.model is None else load_model_and_tokenizer(options.model)


class PrescribedSteps:
    """A trainer whose rollouts are given.

    Attributes:
        step_scale: of the steps to come; `set_over` chooses it.
        trainer: with the objective that ran last.
    """

    def __init__(self, sizes: StepSizes, model_sizes: ModelSizes, options: Options):
        model, tokenizer = model_of(model_sizes, options)
        self.sizes, self.step_scale = sizes, 1.0
        self.micro_batches, rest = divmod(len(sizes.responses), sizes.micro_batch)
        if rest:
            raise ValueError(f"{len(sizes.responses)} responses cannot be cut into micro-batches of {sizes.micro_batch}")
        task = PrescribedTask(sizes.fields)
        config = SelfDistillConfig(
            output_dir=tempfile.mkdtemp(),  # where nothing will be written; removed below
            eval_size=0,
            use_cpu=options.device == "cpu",
            gradient_checkpointing=sizes.checkpointing,
            per_device_train_batch_size=sizes.micro_batch,
            gradient_accumulation_steps=self.micro_batches,
            max_feedback_tokens=100_000,
            max_context_tokens=100_000,
            max_steps=1,
        )
        example = Example("prescribed/0", "", "unknown")
        self.trainer = SelfDistillTrainer(
            model=model, args=config, task=task, processing_class=tokenizer, train_examples=[example], eval_examples=[]
        )
        shutil.rmtree(config.run_dir)
        self.trainer.create_optimizer_and_scheduler(1)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = 0.0
        self.trainer.model.train()
        if sizes.checkpointing:  # what `train` would do; older versions of transformers have the second name only
            student = self.trainer.model
            getattr(student, "activation_checkpointing_enable", student.gradient_checkpointing_enable)()
        # The prompts are filled up to the wanted length, each with words of its own.
        count = max(1, sizes.prompt - len(self.trainer.encoder.encode(student_messages(task, example))))
        names = [f"prescribed/{i}" for i in range(len(sizes.responses))]
        self.examples = [Example(name, words(count, seed=name), "unknown") for name in names]
        draw = random.Random(0)
        rows = cast(nn.Embedding, unwrap(self.trainer.model).get_input_embeddings()).weight.shape[0]
        self.responses = [[draw.randrange(3, rows) for _ in range(length)] for length in sizes.responses]
        self.per_view = ViewScorer(self.trainer.model, share_prefixes=False, max_tokens=1)
        self.shared = ViewScorer(self.trainer.model, share_prefixes=True)

    def prompt_ids(self, example: Example) -> list[int]:
        return self.trainer.encoder.encode(student_messages(self.trainer.task, example))

    def rollouts(self) -> list[Rollout]:
        """New ones, for which no view was tokenised yet, with feedback."""
        verdict = Verdict(False, None, "unknown")
        rollouts = [
            Rollout(example, self.prompt_ids(example), Response(ids, "", True), verdict, prompt_index=index)
            for index, (example, ids) in enumerate(zip(self.examples, self.responses, strict=True))
        ]
        self.trainer.step_log = StepLog(0.0, self.step_scale, started=time.perf_counter())
        return [rollout for rollout in rollouts if self.trainer.enters_training(rollout)]

    def step(self, method: str, share_prefixes: bool = True) -> None:
        """What a training step does after sampling: feedback, scores, loss and gradients, clipping, AdamW, the EMA."""
        trainer = self.trainer
        trainer.objective = load_objective(method)
        trainer.view_scorer = self.shared if share_prefixes else self.per_view
        rollouts = self.rollouts()
        trainer.objective.prepare(trainer.step_batch(rollouts))
        trainer.view_scorer.forget()
        (update,) = trainer.updates(rollouts)
        trainer.update(update, self.micro_batches)

    def facts(self) -> dict[str, float]:
        """What the last step was like."""
        log = self.trainer.step_log
        return {
            "tokens_over_radius": log.averages.means()["chi_active"],
            "step_scale": log.step_scale,
            "score_temperature": self.trainer.args.score_temperature,
            "teacher_tokens": log.sums["teacher_tokens"],
            "teacher_tokens_one_pass_per_view": log.sums["teacher_tokens"] + log.sums["teacher_tokens_saved"],
            "seconds_teacher": log.sums["seconds_score"],
        }

    def set_over(self, share: float, of_tokens: bool = False) -> None:
        """Choose the step scale such that this share of responses has tokens over the radius, or this share of all tokens is over.

        A step scale is at least 1. If the student and its teacher are too far apart for a small share, both are scored at a higher
        temperature, where distributions are flatter and the same hidden states violate less.
        """
        student, full = self.states()
        while True:
            excess = self.excess(student, full)
            values = torch.cat(excess) if of_tokens else torch.stack([tokens.max() for tokens in excess])
            if int((values > 1).sum()) <= round(share * len(values)):
                break
            self.trainer.args.score_temperature *= 1.25
            self.trainer.head = Head.of(unwrap(self.trainer.model), self.trainer.args.score_temperature)
        self.step_scale = step_scale_for(share, values)

    @torch.no_grad()
    def states(self) -> tuple[ResponseStates, ResponseStates]:
        """Of the student and of the full teacher."""
        trainer, rollouts = self.trainer, self.rollouts()
        trainer.view_scorer = self.shared
        (full,) = trainer.score_views(rollouts, ["full"])
        trainer.view_scorer.forget()
        return score_responses(trainer.model, [r.prompt_ids for r in rollouts], self.responses, max_tokens=1), full

    @torch.no_grad()
    def excess(self, student: ResponseStates, full: ResponseStates) -> list[Tensor]:
        """Per response, the norm of the full teacher's gradient over the radius at a step scale of 1, token by token."""
        ids = torch.cat([torch.tensor(response) for response in self.responses]).to(student.hidden.device)
        output = fire_head_loss(
            self.trainer.head,
            student.hidden,
            student.token_weights(),
            token_ids=ids,
            correct=torch.zeros_like(ids, dtype=torch.bool),
            teacher_hidden=full.hidden,
            teacher_head=self.trainer.teacher_head(),
            log_prob_floor=self.trainer.args.log_prob_floor,
            attribution=False,
        )
        return list((output.energy.sqrt() / output.rho).cpu().split(student.lengths))


def prepared_steps(
    variants: Mapping[str, tuple[str, bool]], sizes: StepSizes, model_sizes: ModelSizes, options: Options
) -> dict[str, Callable[[], None]]:
    """Steps whose memory is measured, every token over the radius; `variants` says of each the method and if prefixes are shared."""
    steps = PrescribedSteps(sizes, model_sizes, options)
    steps.set_over(1.0, of_tokens=True)
    return {name: partial(steps.step, *variant) for name, variant in variants.items()}
