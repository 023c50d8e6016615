"""Running out of memory: smaller batches where that helps, and an explanation where it does not."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

logger = logging.getLogger(__name__)

# What PyTorch and the libraries below it say; oneDNN and cuBLAS do not name memory where they fail to get a workspace.
_EXHAUSTED = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
    "alloc_failed",
    "could not create a primitive",
    "could not create a memory",
    "could not execute a primitive",
    "cublas_status_not_initialized",
)

SMALLER_ROLLOUTS = (
    "sampling does not fit; lower rollout_batch_size, max_new_tokens or max_context_tokens, or set merge_adapter false"
)
SMALLER_EVALUATIONS = "evaluation does not fit; lower eval_batch_size, max_new_tokens or max_context_tokens"
TOKENS_PER_FORWARD = 8192  # padded, of a pass that reads given responses
# On a GPU, merged copies of the weights, keys and values stay between the phases of sampling.
SHORTER_CONTEXTS = (
    "scoring a single response does not fit; lower max_context_tokens or max_new_tokens, set merge_adapter false (on a GPU its copies "
    "stay in memory), or use quantization nf4"
)
LOADING = (
    "use --quantization nf4, --model_dtype bfloat16 or a smaller model, end other programs that hold memory, or raise the memory "
    "limit of the process"
)
LOADING_TEACHER = LOADING.replace("--quantization", "--teacher_quantization").replace("--model_dtype", "--teacher_dtype")
SMALLER_MICRO_BATCHES = (
    "training does not fit; lower per_device_train_batch_size and raise gradient_accumulation_steps by the same factor (the result is "
    "the same), turn gradient_checkpointing on, set merge_adapter false (on a GPU its copies stay in memory), and resume with "
    "--allow_changes and their names"
)


def held_memory(device: torch.device) -> int:
    """Bytes that this process holds: at most so far on an accelerator, at present in the machine's memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


class OutOfMemory(ValueError):
    """Not even the smallest batch fits into memory; the message says which settings to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the accelerator or of this machine is exhausted.

    An `OSError` of a class of its own may quote a server, whose memory this is not.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        (isinstance(error, RuntimeError) or type(error) is OSError) and any(text in str(error).lower() for text in _EXHAUSTED)
    )


class BatchLimit:
    """How much goes through the model at once. It is halved, for the rest of the run, whenever memory runs out.

        for attempt in limit.attempts(len(prompts)):
            with attempt:
                states = forward(batches_of(limit.size))

    Args:
        size: prompts or tokens.
        name: the setting it comes from, for the log and the error.
        advice: what a user can change when the smallest size does not fit.
        smallest: the limit is not halved below this size.
        adjustable: False where all processes must make the same number of forward passes.

    Attributes:
        halved: how often it was halved since the caller last set this to 0.
    """

    def __init__(self, size: int, name: str, advice: str, *, smallest: int = 1, adjustable: bool = True):
        self.size, self.name, self.advice, self.smallest, self.adjustable = size, name, advice, smallest, adjustable
        self.halved = 0

    def attempts(self, most: int) -> Iterator[Attempt]:
        """Attempts at a piece of work until one does not run out of memory.

        Args:
            most: the size at which all of the work goes through the model at once; larger limits change nothing.

        Raises:
            OutOfMemory: the smallest size does not fit, or one that is not adjustable.
        """
        while True:
            attempt = Attempt()
            yield attempt
            if attempt.failure is None:
                return
            # The exception is gone by now, and with it the tensors that its traceback held.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._halve(attempt.failure, min(self.size, most))

    def _halve(self, failure: str, tried: int) -> None:
        if tried // 2 < self.smallest:
            raise OutOfMemory(f"out of memory ({failure}): {self.advice}")
        if not self.adjustable:
            first = f"{self.name} is {self.size}: lower it below {tried}"
            raise OutOfMemory(f"out of memory ({failure}): {first}. If that does not help: {self.advice}")
        self.size = tried // 2
        self.halved += 1
        logger.warning("out of memory: %s is %d from this point", self.name, self.size)


def scoring_limit(tokens: int, name: str = "score_tokens_per_forward", *, adjustable: bool = True) -> BatchLimit:
    """The limit of padded tokens per forward pass that reads given responses."""
    return BatchLimit(tokens, name, SHORTER_CONTEXTS, smallest=64, adjustable=adjustable)


class Attempt:
    """A block of work that may run out of memory; `failure` says so afterwards, other errors pass."""

    failure: str | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.failure = " ".join(str(error).split())[:200] or type(error).__name__
        return True


@contextmanager
def explained_memory(advice: str) -> Iterator[None]:
    """Turn exhausted memory inside the block into an `OutOfMemory` that says what to change."""
    attempt = Attempt()
    with attempt:
        yield
    if attempt.failure is not None:
        raise OutOfMemory(f"out of memory ({attempt.failure}): {advice}")


def unused_memory(device: torch.device) -> float:
    """Bytes that this process may still allocate.

    On a GPU this includes what PyTorch's allocator holds without use. The processes of a host share its memory equally.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def total_memory() -> float:
    """Bytes of memory of this host, or this process's share of them."""
    return psutil.virtual_memory().total / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_memory(device: torch.device) -> float:
    """Bytes that this process may use in total: what it may still allocate, and what it has.

    In the machine's memory, pages of mapped files such as weights count once: `unused_memory` already includes them.
    """
    if device.type == "cuda":
        return unused_memory(device) + torch.cuda.memory_allocated(device)
    held = psutil.Process().memory_info()
    return unused_memory(device) + held.rss - getattr(held, "shared", 0)  # `shared`, of mapped files, is known on Linux only
