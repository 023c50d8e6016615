"""Training steps on given rollouts: no sampling, every response wrong, lengths as requested.

The work of a step depends on lengths and on which tokens violate the radius, not on the text: prompts and feedback are common words,
responses are random tokens. With learning rate 0, every repetition is the same step, at the cost of a real one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from peft import PeftModel
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from firedistill.benchmarks.fire_head import gradient_excess, step_scale_for
from firedistill.benchmarks.harness import Options
from firedistill.config import SelfDistillConfig
from firedistill.memory import scoring_limit
from firedistill.metrics import Metrics
from firedistill.models.adapter import compute_in_base_dtype
from firedistill.models.attention import use_own_attention
from firedistill.models.loading import load_model_and_tokenizer
from firedistill.models.lora import add_lora
from firedistill.models.norms import fuse_norms
from firedistill.models.states import ResponseStates, score_responses
from firedistill.objectives import MicroBatch, load_objective
from firedistill.prompts import PromptEncoder, TokenBudget, student_messages
from firedistill.rollout import Response, Rollout
from firedistill.step import select_rollouts
from firedistill.tasks import Example, Task, Verdict
from firedistill.tasks.types import FeedbackField
from firedistill.teacher import Teacher

# Each word is one token of the usual vocabularies, so that a text has about as many tokens as words.
WORDS = ["time", "people", "water", "house", "number", "world", "school", "state", "family"]
TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)
LOG_PROB_FLOOR = SelfDistillConfig.log_prob_floor
WRONG = Verdict(False, None, "unknown")
NO_BUDGET = TokenBudget(100_000, 100_000, 100_000)
# How the teacher reads the views: as in training on this device, common prefixes once, in padded batches, one forward pass per view.
OWN, SHARED, BATCHES, ONE_BY_ONE = ("as in training", "shared prefixes", "batches", "one pass per view")


@dataclass(frozen=True)
class ModelSizes:
    """The random model that runs if no real model is given."""

    layers: int = 8
    width: int = 512
    vocabulary: int = 32_768


@dataclass(frozen=True)
class StepSizes:
    prompt: int  # tokens of a student prompt
    fields: tuple[int, ...]  # words of each feedback field
    responses: tuple[int, ...]  # tokens of each response, ascending
    micro_batch: int = 1  # responses per forward and backward pass
    checkpointing: bool = False  # recompute activations in the backward pass


class PrescribedTask(Task):
    """Feedback fields with a given number of words."""

    name = "prescribed"

    def __init__(self, fields: tuple[int, ...]):
        self.fields = fields

    def feedback(self, example: Example, response: str, verdict: Verdict) -> tuple[FeedbackField, ...]:
        return tuple(FeedbackField(f"field{j}", words(count, seed=f"{example.uid} {j}")) for j, count in enumerate(self.fields))


def words(count: int, seed: int | str = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def model_of(sizes: ModelSizes, options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of the options and its tokenizer, or a random Llama and a tokenizer of whole words."""
    if options.model is not None:
        return load_model_and_tokenizer(options.model, dtype=options.dtype)
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
        initializer_range=0.05,  # large enough for distributions that are not uniform
    )
    return LlamaForCausalLM(config).to(getattr(torch, options.dtype)), word_tokenizer()


def word_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer for which each of `WORDS` is a token, and every other word the unknown one."""
    tokens = ["<|pad|>", "<|start|>", "<|end|>", "<|unknown|>", *WORDS]
    backend = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<|unknown|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class PrescribedSteps:
    """The training steps of a model with a LoRA adapter, on rollouts that are always the same.

    Attributes:
        rollouts: without feedback, which is part of a step.
        teachers: by how they read the views: `OWN`, `SHARED`, `BATCHES` or `ONE_BY_ONE`.
        step_scale: `set_over` chooses it.
    """

    def __init__(self, sizes: StepSizes, model_sizes: ModelSizes, options: Options):
        base, self.tokenizer = model_of(model_sizes, options)
        if options.device == "cuda":  # as in training
            torch.backends.cuda.enable_cudnn_sdp(False)
            fuse_norms(base)
        torch.manual_seed(0)
        self.model = compute_in_base_dtype(add_lora(base)).to(options.device).train()
        if options.device == "cpu" or base.dtype == torch.float32:
            use_own_attention(self.model)
        if sizes.checkpointing:  # older versions of transformers have the second name only
            getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)()
        self.micro_batch, self.step_scale = sizes.micro_batch, 1.0
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=0.0)
        task, encoder = PrescribedTask(sizes.fields), PromptEncoder(self.tokenizer)
        one_response = scoring_limit(1)
        self.teachers = {
            OWN: Teacher(self.model, task, encoder, limit=scoring_limit(32_768) if options.device == "cuda" else None),
            SHARED: Teacher(self.model, task, encoder, share_prefixes=True),
            BATCHES: Teacher(self.model, task, encoder, share_prefixes=False),  # of 8,192 tokens
            ONE_BY_ONE: Teacher(self.model, task, encoder, share_prefixes=False, limit=one_response),
        }
        # Each prompt is filled up to the requested length with its own words.
        count = max(1, sizes.prompt - len(encoder.encode(student_messages(task, Example("", "", "unknown")))))
        draw, vocabulary = random.Random(0), self.teachers[OWN].head.vocabulary_size
        self.rollouts = []
        for i, length in enumerate(sizes.responses):
            example = Example(f"prescribed/{i}", words(count, seed=f"prescribed/{i}"), "unknown")
            response = [draw.randrange(3, vocabulary) for _ in range(length)]
            prompt = encoder.encode(student_messages(task, example))
            self.rollouts.append(Rollout(example, prompt, Response(response, "", True), WRONG, prompt_index=i))

    def step(self, method: str, reading: str = OWN) -> Metrics:
        """What a training step does after sampling: feedback, scores, loss and gradients, clipping, AdamW, the EMA.

        Returns:
            The diagnostics of `metrics.jsonl`, with `loss` and `grad_norm`.
        """
        objective, teacher = load_objective(method), self.teachers[reading]
        selection = select_rollouts(self.rollouts, objective, teacher, NO_BUDGET)
        metrics, loss = selection.metrics, torch.zeros((), device=self.model.device)
        for start in range(0, len(selection.trained), self.micro_batch):
            rollouts = selection.trained[start : start + self.micro_batch]
            batch = MicroBatch(
                rollouts=rollouts,
                prepared=[None] * len(rollouts),
                student=student_states(self.model, rollouts),
                head=teacher.head,
                teacher=teacher,
                responses=len(selection.trained),
                prompts=len(selection.trained),
                step_scale=self.step_scale,
                log_prob_floor=LOG_PROB_FLOOR,
            )
            share, diagnostics = objective.loss(batch)
            teacher.forget()
            share.backward()
            loss += share.detach()
            metrics.merge([diagnostics])
        metrics.mean(loss=loss, grad_norm=torch.nn.utils.clip_grad_norm_(self.trainable, 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        teacher.update()
        return metrics.merge([teacher.take_metrics()])

    def facts(self, metrics: Metrics) -> dict[str, float]:
        """What a step was like, from its diagnostics."""
        row = metrics.row()
        return {
            "tokens_over_radius": row["chi_active"],
            "step_scale": self.step_scale,
            "score_temperature": self.teachers[OWN].temperature,
            "teacher_tokens": row["teacher_tokens"],
            "teacher_tokens_one_pass_per_view": row["naive_teacher_tokens"],
            "seconds_teacher": row["seconds_score"],
        }

    def set_over(self, share: float, of_tokens: bool = False) -> None:
        """Choose the step scale so that this share of the responses has tokens over the radius, or this share of all tokens is over.

        A step scale is at least 1. If the student and its teacher differ too much for a small share, both are scored at a higher
        temperature, where distributions are flatter and the same hidden states violate the radius less.
        """
        while True:
            excess = self.excess()
            values = torch.cat(excess) if of_tokens else torch.stack([tokens.max() for tokens in excess])
            if int((values > 1).sum()) <= round(share * len(values)):
                break
            for teacher in self.teachers.values():
                teacher.temperature *= 1.25
        self.step_scale = step_scale_for(share, values)

    def excess(self) -> list[Tensor]:
        """Per response `[T]`, the norm of the full teacher's gradient over the radius, at step scale 1."""
        student, full = self.states
        excess = gradient_excess(self.teachers[OWN].head, student.hidden, full.hidden, log_prob_floor=LOG_PROB_FLOOR)
        return list(excess.cpu().split(student.lengths))

    @cached_property
    def states(self) -> tuple[ResponseStates, ResponseStates]:
        """Of the student and of the full teacher, which no step changes."""
        rollouts, teacher = self.rollouts_with_feedback(), self.teachers[OWN]
        full = teacher.full(rollouts)
        teacher.forget()
        teacher.take_metrics()
        with torch.no_grad():
            return student_states(self.model, rollouts, max_tokens=1), full

    def rollouts_with_feedback(self) -> list[Rollout]:
        return select_rollouts(self.rollouts, load_objective("fire"), self.teachers[OWN], NO_BUDGET).trained


def student_states(model: PeftModel, rollouts: Sequence[Rollout], max_tokens: int | None = None) -> ResponseStates:
    return score_responses(model, [r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts], max_tokens=max_tokens)
