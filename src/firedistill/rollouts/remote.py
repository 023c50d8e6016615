"""What engines in other processes share: requests that vLLM would change are refused, and responses carry log-probabilities."""

from __future__ import annotations

import hashlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from firedistill.metrics import Metrics
from firedistill.models.states import unwrap
from firedistill.models.tokens import stop_token_ids
from firedistill.rollout import Response, Sampling
from firedistill.rollouts.weights import check_adapter

VERSIONS = 2  # adapters that an engine keeps: the student's and the teacher's
TESTED = (0, 32)  # vLLM

logger = logging.getLogger(__name__)


class RolloutError(OSError):
    """An engine in another process that failed; the run resumes from its last checkpoint."""


@dataclass(frozen=True)
class Request:
    """One prompt, its place in the call, and vLLM's sampling parameters for it."""

    index: int
    prompt: list[int]
    parameters: dict[str, Any]


class RemoteEngine(ABC):
    """A `RolloutEngine` whose model is in another process.

    Args:
        model: the student, with one plain LoRA adapter.
        tokenizer: decodes the responses.
        context: the largest number of tokens of prompt and response.
        sequences: responses sampled at the same time.

    Attributes:
        metrics: seconds of exporting weights, loading them and sampling, since `take_metrics`.

    Raises:
        AdapterError: the adapter is not plain LoRA.
    """

    sharded = False  # whether the student's base model may be spread over processes

    def __init__(self, model: PeftModel, tokenizer: PreTrainedTokenizerBase, *, context: int, sequences: int = 32):
        check_adapter(model, self.sharded)
        self.model, self.tokenizer, self.context, self.sequences = model, tokenizer, context, sequences
        self.stop_ids = stop_token_ids(model, tokenizer)
        self.vocabulary = unwrap(model).config.get_text_config().vocab_size
        self.metrics = Metrics()
        self.on_response: Callable[[int, Response], Any] | None = None

    @abstractmethod
    def _sample(self, requests: Sequence[Request]) -> Iterable[tuple[Request, list[int], list[float]]]:
        """The token ids of each response, the stop token included, and their log-probabilities, in any order."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the engine holds outside of this process."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        seed: int,
        progress: Callable[[int], None] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Response]:
        """See `RolloutEngine`; responses have `log_probs`. A limit of 0 is an empty response.

        Raises:
            ValueError: a request that vLLM would change or not survive.
            RolloutError: the other process failed.
        """
        limits = limits if limits is not None else [sampling.max_new_tokens] * len(prompts)
        check_requests(prompts, sampling, limits, self.context, self.vocabulary)
        requests = [
            Request(index, prompt, request_parameters(sampling, limit, prompt_seed(seed, index), self.stop_ids))
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            if limit > 0
        ]
        responses = [Response([], "", finished=False) for _ in prompts]
        done = len(prompts) - len(requests)
        for request, ids, log_probs in self._sample(requests) if requests else ():
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            responses[request.index] = Response(ids, text, finished=bool(ids) and ids[-1] in self.stop_ids, log_probs=log_probs)
            done += 1
            if self.on_response is not None:
                self.on_response(request.index, responses[request.index])
            if progress is not None:
                progress(done)
        return responses

    def take_metrics(self) -> Metrics:
        """The metrics since the last call."""
        metrics, self.metrics = self.metrics, Metrics()
        return metrics


def check_vllm(version: str, where: str) -> None:
    """Warn of a vLLM that is newer than the tested one.

    Raises:
        ValueError: it is older.
    """
    found, tested = tuple(int(number) for number in re.findall(r"\d+", version)[:2]), ".".join(map(str, TESTED))
    if found < TESTED:
        raise ValueError(f"{where} has vLLM {version}: expected {tested}; install it, or use --rollouts hf")
    if found > TESTED:
        logger.warning("%s has vLLM %s; %s is tested", where, version, tested)


def supports_temperature(temperature: float) -> bool:
    """Whether vLLM samples at this temperature."""
    return temperature == 0 or 0.01 <= temperature <= 2


def check_requests(
    prompts: Sequence[list[int]], sampling: Sampling, limits: Sequence[int], context: int, vocabulary: int
) -> None:
    """Raise ValueError for a request that vLLM would cut, round or not survive."""
    if not supports_temperature(sampling.temperature):
        raise ValueError(f"temperature is {sampling.temperature}: vLLM supports 0 (greedy) and 0.01 to 2; use --rollouts hf")
    for prompt, limit in zip(prompts, limits, strict=True):
        if not prompt:
            raise ValueError("a prompt has no tokens")
        if len(prompt) + limit > context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with up to {limit} new ones exceeds the engine's context of {context}"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ValueError(f"a prompt has token ids outside of the vocabulary of {vocabulary}")


def prompt_seed(seed: int, index: int) -> int:
    """31 bits per prompt of a call."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:4]) >> 1


def request_parameters(sampling: Sampling, limit: int, seed: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's sampling parameters of one request, with nothing of the checkpoint's."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.temperature > 0 else 1.0,
        "top_k": sampling.top_k if sampling.temperature > 0 else 0,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": limit,
        "seed": seed,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # the stop tokens are ours
        "min_p": 0.0,
        "logprobs": 0,  # of the sampled token, before temperature and truncation
    }
