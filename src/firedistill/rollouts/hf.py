"""Rollouts by `transformers` generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from firedistill.rollouts.engine import Response, Sampling


class HFRolloutEngine:
    """Samples with the live student, batched so that prompts of one batch have nearly equal lengths.

    Args:
        model: a causal language model, possibly with an adapter.
        tokenizer: its tokenizer, with a pad token.
        batch_size: prompts per `generate` call.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 32):
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.stop_ids = stop_token_ids(model, tokenizer)

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
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        responses: list[Response | None] = [None] * len(prompts)
        device = self.model.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            inference_mode(self.model),
            only_these_settings(self.model),
        ):
            torch.manual_seed(seed)
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                # A response that was sampled further than its limit is cut there: its tokens are what they would have been.
                law = replace(sampling, max_new_tokens=max(limits[i] for i in batch))
                sampled = self._generate_batch([prompts[i] for i in batch], law)
                for index, ids in zip(batch, sampled, strict=True):
                    responses[index] = self._response(ids[: limits[index]])
                if progress is not None:
                    progress(start + len(batch))
        return responses

    def _generate_batch(self, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        device = self.model.device
        input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device)
        attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        output = self.model.generate(
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
        return Response(kept, self.tokenizer.decode(kept, skip_special_tokens=True), finished=stop is not None)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the checkpoint's end-of-sequence tokens and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*ids, tokenizer.eos_token_id] if token is not None})


@contextmanager
def inference_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; the training flag is put back."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def only_these_settings(model: PreTrainedModel) -> Iterator[None]:
    """Hide the checkpoint's generation settings: `generate` fills every default with them (top-k 20, repetition penalty 1.1, ...)."""
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    owners = {id(owner): owner for owner in (model, causal_lm)}.values()
    saved = [(owner, owner.generation_config) for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in saved:
            owner.generation_config = config
