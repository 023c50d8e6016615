"""Sampling with the adapter: the package's own loop on a merged copy, against `generate` with the adapter as it is.

Every response is sampled to its full length, since nothing stops it, so that all variants make the same number of steps. The bare
forwards are the floor of a loop that runs the merged model as it is: the prompts once, then a token per row and step, with nothing
chosen and nothing read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from transformers import PreTrainedModel

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, model_of, words
from firedistill.models.lora import add_lora
from firedistill.prompts import PromptEncoder
from firedistill.rollouts.decoding import _Batch
from firedistill.rollouts.engine import Sampling
from firedistill.rollouts.hf import HFRolloutEngine, inference_mode
from firedistill.rollouts.merging import merged_adapter

TITLE = "Sampling with a LoRA adapter"


@dataclass
class Sizes:
    """
    Attributes:
        prompts: words of the shortest and the longest prompt of a batch.
        new_tokens: tokens of every response.
        parts: measure what merging and the loop gain each, and the bare forwards.
    """

    batches: tuple[int, ...] = (8, 32)
    prompts: tuple[int, int] = (60, 150)
    new_tokens: int = 200
    parts: bool = True
    model: ModelSizes = field(default_factory=ModelSizes)
    repeats: int = 3


SIZES = {"full": Sizes(), "quick": Sizes((8,), new_tokens=50, parts=False, model=ModelSizes(4, 256, 8192))}


class GenerateEngine(HFRolloutEngine):
    """Always by `generate`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.causal_lm = None


def sweeps(sizes: Sizes) -> dict:
    return {}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    base, tokenizer = model_of(sizes.model, options)
    base.to(options.device)  # type: ignore[arg-type]  # transformers wraps `to` in a decorator without types
    model = add_lora(base).eval()
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # as after some training: an adapter of zeros would be too easy
            parameter.data.copy_(0.01 * torch.randn(parameter.shape, generator=draw))
    encoder = PromptEncoder(tokenizer)
    law = Sampling(0.8, 0.95, sizes.new_tokens)
    for batch in sizes.batches:
        prompts = [
            encoder.encode([{"role": "user", "content": words(random.Random(i).randint(*sizes.prompts), seed=i)}])
            for i in range(batch)
        ]
        engines = {
            "generate, unmerged": GenerateEngine(model, tokenizer, batch, merge_adapter=False),
            "generate, merged": GenerateEngine(model, tokenizer, batch, merge_adapter=True),
            "own loop, unmerged": HFRolloutEngine(model, tokenizer, batch, merge_adapter=False),
            "own loop, merged": HFRolloutEngine(model, tokenizer, batch, merge_adapter=True),
        }
        for engine in engines.values():
            engine.stop_ids = []
        variants: dict[str, Callable[[], int]] = {
            name: partial(sample, engine, prompts, law) for name, engine in engines.items()
        }
        variants["bare forwards, merged"] = partial(bare_forwards, engines["own loop, merged"], prompts, law.max_new_tokens)
        if not sizes.parts:
            variants = {name: variants[name] for name in ("generate, unmerged", "own loop, merged")}
        for name in engines.keys() & variants.keys():  # the first call pays for memory and kernels
            sample(engines[name], prompts[:4], Sampling(0.8, 0.95, 2))
        case = {"batch": batch, "tokens": sizes.new_tokens}
        yield from harness.rows(case, variants, options.repeats or sizes.repeats, warm_up=False)


def sample(engine: HFRolloutEngine, prompts: list[list[int]], law: Sampling) -> int:
    """Sampled tokens."""
    return sum(len(response.token_ids) for response in engine.generate(prompts, law, seed=0))


def bare_forwards(engine: HFRolloutEngine, prompts: list[list[int]], steps: int) -> int:
    with inference_mode(engine.model), merged_adapter(engine.model):
        batch = _Batch(cast(PreTrainedModel, engine.causal_lm), [tuple(p) for p in prompts], steps, 0, remember=False)
        batch.read_prompts()
        for _ in range(steps - 1):
            batch.read(torch.full((len(prompts),), 5, device=engine.model.device))
    return len(prompts) * steps
