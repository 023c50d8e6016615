"""Rollouts of a `transformers` model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from firedistill.memory import SMALLER_ROLLOUTS, BatchLimit
from firedistill.models.states import inference_mode, unwrap
from firedistill.models.tokens import stop_token_ids
from firedistill.rollout import Response, Sampling
from firedistill.rollouts.decoding import Batch, GrowingBatch, Prompts, can_decode, decode
from firedistill.rollouts.fixed import Decoder, FixedBatch, can_fix
from firedistill.rollouts.merging import merged_adapter

MERGING_PAYS_AFTER = 16  # decoding steps of one call


class HFRolloutEngine:
    """Samples with the live student, batched so that prompts of one batch have nearly equal lengths.

    The loop in `decoding.py` samples where `can_decode` allows it, and `generate` of `transformers` elsewhere. The sampling
    parameters mean the same in both.

    With `merge_adapter` a call runs on copies `W + s B A` of the adapted projections, made from the current weights and dropped
    afterwards (`merging.py`). The copies take as much memory as the projections; in bfloat16 on a CPU they are packed for its
    kernels, and so is a copy of the output projection. Their rounding differs from that of the unmerged model: on SmolLM2-135M in
    bfloat16 with factors B of standard deviation 0.01, KL(merged || unmerged) is 2.1e-3 per token (2,400 tokens of text), and each of
    the two is 1.3e-3 away from the same model in float32, where they agree to 1e-9.

    Args:
        model: a causal language model, possibly with an adapter.
        tokenizer: its tokenizer, with a pad token.
        batch_size: prompts sampled together; halved when memory runs out, which changes the responses of `decoding.py` by
            rounding only.
        merge_adapter: None merges where the call is long enough to pay for it. Layers that cannot be merged (NF4) run unmerged in
            any case.
        fixed: keep merged copies, keys and values in the same memory from call to call, and look at the tokens after every 16 of them
            only (`fixed.py`), where the model allows it. None does so on GPUs, whose host does not keep up otherwise.
        fuse_layers: where the call merges, run decoder layers in fewer operations (`layers.py`), which rounds in other places.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int | BatchLimit = 32,
        merge_adapter: bool | None = None,
        fixed: bool | None = None,
        fuse_layers: bool = True,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.merge_adapter, self.fuse_layers = merge_adapter, fuse_layers
        self.limit = (
            batch_size if isinstance(batch_size, BatchLimit) else BatchLimit(batch_size, "rollout_batch_size", SMALLER_ROLLOUTS)
        )
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.causal_lm = causal_lm_for_decoding(model)
        self.on_response: Callable[[int, Response], Any] | None = None
        self.decoder: Decoder | None = None
        self.copies: dict[nn.Module, nn.Module] | None = None
        fixed = model.device.type == "cuda" if fixed is None else fixed
        if fixed and self.causal_lm is not None and can_fix(self.causal_lm):
            self.decoder, self.copies = Decoder(self.causal_lm, tokenizer.pad_token_id, self.stop_ids), {}

    def sharing(self, limit: BatchLimit) -> HFRolloutEngine:
        """An engine with another batch size and the same memory."""
        other = copy.copy(self)
        other.limit = limit
        return other

    @contextmanager
    def returning_memory(self) -> Iterator[None]:
        """Free keys and values at the end if calls inside the block have made room for more of them."""
        before = self.decoder and (self.decoder.rows, self.decoder.columns)
        yield
        if self.decoder is not None and (self.decoder.rows, self.decoder.columns) != before:
            self.decoder.release()

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        seed: int,
        progress: Callable[[int], None] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Response]:
        """One response per prompt, in order; the same seed gives the same responses. The caller's random state is left alone.

        Raises:
            OutOfMemory: a single prompt does not fit.
        """
        limits = limits if limits is not None else [sampling.max_new_tokens] * len(prompts)
        for attempt in self.limit.attempts(sum(limit > 0 for limit in limits)):
            with attempt, self._released_on_failure():
                sampled = self._sample(prompts, sampling, seed, progress, limits)
        return [self._response(ids) for ids in sampled]

    @contextmanager
    def _released_on_failure(self) -> Iterator[None]:
        """Free what is kept from call to call if the block raises: memory may be short, or the values not finite."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free what is kept from call to call: merged copies, keys and values, graphs. The next call makes them again."""
        if self.decoder is not None and self.copies is not None:
            self.decoder.release()
            self.copies.clear()

    def _sample(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        seed: int,
        progress: Callable[[int], None] | None,
        limits: Sequence[int],
    ) -> list[list[int]]:
        """Token ids of the responses, batch by batch."""
        order = sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda index: len(prompts[index]))
        batches = [order[start : start + self.limit.size] for start in range(0, len(order), self.limit.size)]
        steps = sum(max(limits[i] for i in batch) for batch in batches)
        # Each prompt has its own random numbers, so its response does not depend on how the batches are cut.
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(len(prompts), max(limits, default=0), dtype=torch.float64, generator=generator)
        sampled: list[list[int]] = [[] for _ in prompts]
        done = len(prompts) - len(order)
        device = self.model.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            inference_mode(self.model),
            only_these_settings(self.model),
            merged_adapter(self.model, self.copies, self.fuse_layers) if self._merges(steps) else nullcontext(),
        ):
            torch.manual_seed(seed)
            for batch in batches:
                few = [prompts[i] for i in batch], replace(sampling, max_new_tokens=max(limits[i] for i in batch))
                if self.causal_lm is None:
                    responses = self._generate_batch(*few)
                else:
                    responses = self._decode_batch(*few, [limits[i] for i in batch], uniforms[batch])
                for index, ids in zip(batch, responses, strict=True):
                    sampled[index] = ids[: limits[index]]  # `generate` samples the batch up to its largest limit
                    if self.on_response is not None:
                        self.on_response(index, self._response(sampled[index]))
                done += len(batch)
                if progress is not None:
                    progress(done)
        return sampled

    def _merges(self, steps: int) -> bool:
        return steps >= MERGING_PAYS_AFTER if self.merge_adapter is None else self.merge_adapter

    def _decode_batch(
        self, prompts: list[list[int]], sampling: Sampling, limits: list[int], uniforms: Tensor
    ) -> list[list[int]]:
        assert self.causal_lm is not None  # `generate` has looked
        batch: Batch
        if self.decoder is not None:
            batch = FixedBatch(self.decoder, prompts, sampling, uniforms[:, : max(limits)])
        else:
            pad = self.tokenizer.pad_token_id
            batch = GrowingBatch(self.causal_lm, prompts, sampling, uniforms[:, : max(limits)], pad)
        # Each expert for its own tokens suits prompts; single tokens are read as `generate` reads them.
        with getattr(self.causal_lm, "_optimize_model_for_decode", nullcontext)():
            return decode(batch, limits, self.stop_ids)

    def _generate_batch(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        read = Prompts(prompts, self.tokenizer.pad_token_id, self.model.device)
        model: Any = self.model  # only the model's own class is known to generate
        output = model.generate(
            input_ids=read.ids[read.expansion],
            attention_mask=read.mask[read.expansion],
            generation_config=self._generation_config(sampling),
            synced_gpus=False,  # a sharded model keeps step by itself
        )
        return output[:, read.ids.shape[-1] :].tolist()

    def _generation_config(self, sampling: Sampling) -> GenerationConfig:
        draw: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            draw = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=self.stop_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            **draw,
        )

    def _response(self, ids: list[int]) -> Response:
        """Cut after the first stop token: the rest is padding."""
        stop = next((position for position, token in enumerate(ids) if token in self.stop_ids), None)
        kept = ids if stop is None else ids[: stop + 1]
        return Response(kept, cast(str, self.tokenizer.decode(kept, skip_special_tokens=True)), finished=stop is not None)


def causal_lm_for_decoding(model: PreTrainedModel | PeftModel) -> PreTrainedModel | None:
    """The model to run `decode` on: itself, or what its adapter sits in; None if `generate` has to do it."""
    causal_lm = unwrap(model)
    return causal_lm if can_decode(causal_lm) else None


@contextmanager
def only_these_settings(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Hide the checkpoint's generation settings: `generate` fills every default with them (top-k 20, repetition penalty 1.1, ...)."""
    owners = {id(owner): owner for owner in (model, unwrap(model))}.values()
    saved = [(owner, owner.generation_config) for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in saved:
            owner.generation_config = config
