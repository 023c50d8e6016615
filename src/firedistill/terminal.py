"""Output to a terminal: it never ends a command, untrusted text is escaped, and libraries are quiet."""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Control characters except tab and newline, line separators, text-direction controls and lone surrogates.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text of models, datasets and files with every character that could control a terminal or reorder a line as an escape."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean learning_rate?`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def shortened(text: str, most: int = 200) -> str:
    """The text, or its beginning and an ellipsis where it has more than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def some(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 2 more`: the first names and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def process_rank() -> int:
    """The rank that torchrun gives this process; 0 for a process on its own."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else 0


def of_rank() -> str:
    """`[rank 1] `, to begin a line of a process other than the main one; empty for that one."""
    return f"[rank {rank}] " if (rank := process_rank()) else ""


def plain_console() -> Console:
    """Standard output, on the main process only. Paths, names and texts of others are never markup."""
    from rich.console import Console

    return Console(
        width=None if sys.stdout.isatty() else 160,
        markup=False,
        emoji=False,
        highlight=False,
        quiet=process_rank() > 0,
        force_jupyter=False,
    )


def in_notebook() -> bool:
    """Whether the output goes to cells of a notebook."""
    from rich.console import Console

    return Console().is_jupyter


class Visibly(logging.Formatter):
    """Formats a log message as a single line of visible characters."""

    def format(self, record: logging.LogRecord) -> str:
        return of_rank() + visible(record.getMessage()).replace("\n", r"\n")


class UnfailingStream:
    """A text stream whose `write` and `flush` never raise: a full disk, a closed pipe or a lost terminal ends no command.

    Characters that the encoding lacks are written as escapes. Text that cannot be written is lost; later text is tried again.

    Args:
        stream: where to write.
        name: of the stream, for messages.

    Attributes:
        failure: the first error; None without one.
        other: the stream on which the first error is reported.
        reports_pipes: whether that includes a pipe whose reader has ended, such as `head`.
    """

    def __init__(self, stream: Any, name: str):
        self.stream, self.name = stream, name
        self.failure: Exception | None = None
        self.other: UnfailingStream | None = None
        self.reports_pipes = True
        with suppress(AttributeError, OSError, ValueError):  # a stream of another class, or one that is closed
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self.failed(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        first, self.failure = self.failure is None, self.failure or error
        if first and self.other is not None and (self.reports_pipes or not isinstance(error, BrokenPipeError)):
            self.other.write(f"{of_rank()}{self.name} cannot be written ({error}); the command continues without it\n")
            self.other.flush()

    def release(self) -> None:
        """Flush, and report no more. If writing has failed, the null device takes the place of the file, since the interpreter
        flushes at its end, too."""
        self.flush()
        self.other = None
        if self.failure is not None:
            with suppress(OSError, ValueError):
                descriptor, null = self.stream.fileno(), os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def unfailing_output(report_pipes: bool = True) -> Iterator[UnfailingStream]:
    """Standard output and error that never raise, for as long as the block runs; yields standard output.

    A standard stream that is closed becomes the null device. Otherwise the next file that is opened would get its descriptor, and
    whatever a library prints would be written into that file.

    Args:
        report_pipes: report a pipe whose reader has ended on the other stream, as every other failure.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    before = sys.stdin, sys.stdout, sys.stderr
    with open(os.devnull) as no_input, open(os.devnull, "w") as no_output:
        out = UnfailingStream(sys.stdout or no_output, "standard output")
        err = UnfailingStream(sys.stderr or no_output, "standard error")
        out.other, err.other = err, out
        out.reports_pipes = err.reports_pipes = report_pipes
        sys.stdin, sys.stdout, sys.stderr = sys.stdin or no_input, out, err
        try:
            yield out
        finally:
            out.release()
            err.release()
            sys.stdin, sys.stdout, sys.stderr = before


@contextmanager
def without_messages(name: str) -> Iterator[None]:
    """No messages of a logger but errors."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def quiet_libraries() -> None:
    """Hide the progress bars and developer notes of the libraries. Their warnings to users stay, those of the main process."""
    import transformers  # takes seconds to import

    transformers.utils.logging.disable_progress_bar()
    if process_rank():
        transformers.utils.logging.set_verbosity_error()
    if logging.lastResort is not None:  # prints the package's warnings where logging is not configured
        logging.lastResort.setFormatter(Visibly())
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
