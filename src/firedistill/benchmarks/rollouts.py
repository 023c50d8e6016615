"""Sampling with the adapter: the package's decoding loop on a merged copy, compared with `generate` on the unmerged adapter.

Every response is sampled to its full length, so that all variants make the same number of steps. "Bare forwards" is the lower bound of
a loop over the merged model: it reads the prompts once, then one token per row and step, without choosing tokens. Where vLLM is
installed, it samples too. The adapter changes before every call, as in training, so that its times include handing over the weights.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import cast

import torch
from transformers import PreTrainedModel

from firedistill.benchmarks import harness
from firedistill.benchmarks.prescribed import ModelSizes, model_of, words
from firedistill.models.lora import add_lora
from firedistill.models.states import inference_mode
from firedistill.prompts import PromptEncoder
from firedistill.rollout import Sampling
from firedistill.rollouts.decoding import GrowingBatch
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.rollouts.load import in_use
from firedistill.rollouts.merging import merged_adapter
from firedistill.rollouts.vllm import VLLMEngine

TITLE = "Sampling with a LoRA adapter"


@dataclass
class Sizes:
    batches: tuple[int, ...] = (8, 32)
    prompts: tuple[int, int] = (60, 150)  # words of the shortest and the longest prompt
    new_tokens: int = 200  # tokens of every response
    parts: bool = True  # also measure the gain of merging and of the loop separately, and the bare forwards
    model: ModelSizes = ModelSizes()
    repeats: int = 3


SIZES = {"full": Sizes(), "quick": Sizes((8,), new_tokens=50, parts=False, model=ModelSizes(4, 256, 8192))}


def run(sizes: Sizes, options: harness.Options) -> Iterator[harness.Row]:
    base, tokenizer = model_of(sizes.model, options)
    model = add_lora(base).to(options.device).eval()
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # as after some training: with zeros, merging would change nothing
            parameter.data.copy_(0.01 * torch.randn(parameter.shape, generator=draw))
    encoder = PromptEncoder(tokenizer)
    sampling = Sampling(0.8, 0.95, sizes.new_tokens)
    for batch in sizes.batches:
        prompts = [
            encoder.encode([{"role": "user", "content": words(random.Random(i).randint(*sizes.prompts), seed=i)}])
            for i in range(batch)
        ]
        variants: dict[str, Callable[[], object]] = {}
        for loop, adapter in product(("generate", "own loop"), ("unmerged", "merged")):
            engine = HFRolloutEngine(model, tokenizer, batch, merge_adapter=adapter == "merged")
            engine.stop_ids.clear()  # the decoder has the same list
            if loop == "generate":
                engine.causal_lm = None
            if sizes.parts or (loop, adapter) in (("generate", "unmerged"), ("own loop", "merged")):
                engine.generate(prompts[:4], Sampling(0.8, 0.95, 2), seed=0)  # the first call initializes memory and kernels
                variants[f"{loop}, {adapter}"] = partial(engine.generate, prompts, sampling, seed=0)
        if sizes.parts and options.device == "cpu":  # eager passes are no bound of a loop that replays graphs
            variants["bare forwards, merged"] = partial(bare_forwards, engine, prompts, sizes.new_tokens)
        case = {"batch": batch, "tokens": sizes.new_tokens}
        with ExitStack() as stack:
            if importlib.util.find_spec("vllm"):
                context = max(map(len, prompts)) + sizes.new_tokens
                vllm = VLLMEngine(model, tokenizer, context=context, sequences=batch)
                stack.enter_context(in_use(vllm))
                vllm.stop_ids = []
                vllm.generate(prompts[:4], Sampling(0.8, 0.95, 2), seed=0)  # starts it
                variants[f"vLLM, {vllm.weights}"] = partial(changed, vllm, prompts, sampling)
            yield from harness.rows(case, variants, options.repeats or sizes.repeats, warm_up=False)


def changed(engine: VLLMEngine, prompts: list[list[int]], sampling: Sampling) -> None:
    """Sample with another version of the weights than before."""
    next(p for name, p in engine.model.named_parameters() if "lora_B" in name).data.add_(1e-6)
    engine.generate(prompts, sampling, seed=0)


def bare_forwards(engine: HFRolloutEngine, prompts: list[list[int]], steps: int) -> None:
    causal_lm = cast(PreTrainedModel, engine.causal_lm)
    with inference_mode(engine.model), merged_adapter(engine.model, fuse_layers=True):
        batch = GrowingBatch(causal_lm, prompts, Sampling(), torch.zeros(len(prompts), steps), pad_id=0)
        for _ in range(steps - 1):
            batch.forward(torch.full((len(prompts), 1), 5, device=causal_lm.device))
