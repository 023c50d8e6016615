"""Output to a terminal: untrusted text is escaped, and libraries are quiet."""

from __future__ import annotations

import logging
import re
import warnings

# Control characters except tab and newline, line separators, text-direction controls and lone surrogates.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text of models, datasets and files with every character that could control a terminal or reorder a line as an escape."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class Visibly(logging.Formatter):
    """Formats a log message as a single line of visible characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(record.getMessage()).replace("\n", r"\n")


def quiet_libraries() -> None:
    """Hide the progress bars and developer notes of the libraries. Their warnings to users stay."""
    import transformers  # takes seconds to import

    transformers.utils.logging.disable_progress_bar()
    if logging.lastResort is not None:  # prints the package's warnings where logging is not configured
        logging.lastResort.setFormatter(Visibly())
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
