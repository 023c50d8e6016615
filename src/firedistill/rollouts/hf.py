"""Rollouts of a `transformers` model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from firedistill.rollouts.decoding import can_decode, decode
from firedistill.rollouts.engine import Response, Sampling
from firedistill.rollouts.merging import merged_adapter, merged_bytes

MERGING_PAYS_AFTER = 16  # decoding steps of one call


class HFRolloutEngine:
    """Samples with the live student, batched so that prompts of one batch have nearly equal lengths.

    A loop of our own (`decoding.py`) samples where `can_decode` allows it, `transformers`' generate elsewhere and where all ranks have
    to step together (FSDP, ZeRO-3). The law is the same.

    With `merge_adapter` the call runs on copies `W + s B A` of the adapted projections, made from the weights of the moment and
    dropped afterwards (`merging.py`); the base is never written to. The copies take as much memory as the projections;
    in bfloat16 on a CPU they are packed for its kernels, and so is a copy of the output projection. Their rounding
    to the type of the base makes the sampling policy differ from the unmerged one, which rounds elsewhere: on SmolLM2-135M in
    bfloat16 with a trained adapter, KL(merged || unmerged) is 1.0e-3 per token, and each of the two is 0.65e-3 away from the same
    model in float32, where they agree to 3e-9. Merging is thus no further from the exact policy than not merging.

    Args:
        model: a causal language model, possibly with an adapter.
        tokenizer: its tokenizer, with a pad token.
        batch_size: prompts sampled together.
        merge_adapter: None merges if the copies take less than half of the accelerator's free memory (always on the CPU) and the
            call is long enough to earn the merging back. Layers that cannot be merged (NF4) run unmerged in any case.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 32,
        merge_adapter: bool | None = None,
    ):
        self.model, self.tokenizer, self.batch_size, self.merge_adapter = model, tokenizer, batch_size, merge_adapter
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.causal_lm = causal_lm_for_decoding(model)

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        seed: int,
        progress: Callable[[int], None] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Response]:
        """One response per prompt, in order; the same seed gives the same responses. The caller's random state is left alone."""
        limits = limits if limits is not None else [sampling.max_new_tokens] * len(prompts)
        order = sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda index: len(prompts[index]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        steps = sum(max(limits[i] for i in batch) for batch in batches)
        # Each prompt has its own random numbers, so that its response does not depend on how the batches are cut.
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(len(prompts), max(limits, default=0), dtype=torch.float64, generator=generator)
        sampled: list[list[int]] = [[] for _ in prompts]
        done = len(prompts) - len(order)
        device = self.model.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            inference_mode(self.model),
            only_these_settings(self.model),
            merged_adapter(self.model) if self._merges(steps) else nullcontext(),
        ):
            torch.manual_seed(seed)
            for batch in batches:
                few = [prompts[i] for i in batch], replace(sampling, max_new_tokens=max(limits[i] for i in batch))
                if self.causal_lm is None or steps_together(self.model):
                    responses = self._generate_batch(*few)
                else:
                    responses = self._decode_batch(*few, [limits[i] for i in batch], uniforms[batch])
                for index, ids in zip(batch, responses, strict=True):
                    # A response that was sampled further than its limit is cut there: its tokens are what they would have been.
                    sampled[index] = ids[: limits[index]]
                done += len(batch)
                if progress is not None:
                    progress(done)
        return [self._response(ids) for ids in sampled]

    def _merges(self, steps: int) -> bool:
        if self.merge_adapter is not None:
            return self.merge_adapter
        if steps < MERGING_PAYS_AFTER or steps_together(self.model):
            return False
        device = self.model.device
        return device.type != "cuda" or merged_bytes(self.model) < torch.cuda.mem_get_info(device)[0] / 2

    def _decode_batch(
        self, prompts: list[list[int]], sampling: Sampling, limits: list[int], uniforms: Tensor
    ) -> list[list[int]]:
        assert self.causal_lm is not None  # `generate` has looked
        pad = self.tokenizer.pad_token_id
        return decode(self.causal_lm, prompts, sampling, limits, uniforms, self.stop_ids, pad)

    def _generate_batch(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        device = self.model.device
        input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device)
        attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        model: Any = self.model  # only the model's own class is known to generate
        output = model.generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=self._generation_config(sampling)
        )
        return output[:, width:].tolist()

    def _generation_config(self, sampling: Sampling) -> GenerationConfig:
        law = {}
        if sampling.temperature > 0:
            law = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=self.stop_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            **(law or {"do_sample": False}),
        )

    def _response(self, ids: list[int]) -> Response:
        """Cut after the first stop token; what follows it is padding."""
        stop = next((position for position, token in enumerate(ids) if token in self.stop_ids), None)
        kept = ids if stop is None else ids[: stop + 1]
        return Response(kept, cast(str, self.tokenizer.decode(kept, skip_special_tokens=True)), finished=stop is not None)


def stop_token_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the checkpoint's end-of-sequence tokens and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*ids, tokenizer.eos_token_id] if token is not None})


def causal_lm_for_decoding(model: PreTrainedModel | PeftModel) -> PreTrainedModel | None:
    """The model to run `decode` on: itself, or what an adapter of the LoRA kind sits in; None if `generate` has to do it."""
    if isinstance(model, PeftModel):
        if model.active_peft_config.is_prompt_learning or model.active_peft_config.is_adaption_prompt:
            return None
        model = cast(PreTrainedModel, model.get_base_model())
    return model if can_decode(model) else None


def steps_together(model: torch.nn.Module) -> bool:
    """The weights are sharded over ranks (FSDP, ZeRO-3): all ranks must run the same number of forward passes, as `generate` does."""
    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


@contextmanager
def inference_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; the training flags are put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def only_these_settings(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Hide the checkpoint's generation settings: `generate` fills every default with them (top-k 20, repetition penalty 1.1, ...)."""
    causal_lm: PreTrainedModel | PeftModel = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
    owners = {id(owner): owner for owner in (model, causal_lm)}.values()
    saved = [(owner, owner.generation_config) for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in saved:
            owner.generation_config = config
