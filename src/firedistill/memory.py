"""What happens when memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")

# What a user can do.
SMALLER_ROLLOUTS = "sampling does not fit; lower rollout_batch_size, max_new_tokens or max_context_tokens"
SHORTER_CONTEXTS = "scoring a single response does not fit; lower max_context_tokens or max_new_tokens, or use quantization nf4"
SMALLER_MICRO_BATCHES = (
    "training does not fit; lower per_device_train_batch_size and raise gradient_accumulation_steps by the same factor (the result is "
    "the same), turn gradient_checkpointing on, and go on with --allow_changes and their names"
)


class OutOfMemory(ValueError):
    """Not even the smallest pieces fit into memory; the message says what to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted, of the accelerator or of the machine."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in ("out of memory", "can't allocate memory"))
    )


def in_smaller_pieces(attempt: Callable[[], Result], shrink: Callable[[], bool], mend: str) -> Result:
    """`attempt()`, again with smaller pieces each time that memory runs out.

    Args:
        shrink: makes the pieces smaller; False if they are as small as they can be.
        mend: what the user can do then.

    Raises:
        OutOfMemory: the smallest pieces do not fit.
    """
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
        # Outside of the except block, where the traceback would hold on to the tensors.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not shrink():
            raise OutOfMemory(f"out of memory ({reason}): {mend}")


@contextmanager
def explained_memory(mend: str) -> Iterator[None]:
    """Turn an exhausted memory inside the block into an `OutOfMemory` that says what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory ({' '.join(str(error).split())[:200]}): {mend}") from error
