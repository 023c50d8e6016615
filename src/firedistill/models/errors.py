"""`ModelError`, and one-line explanations of what transformers, huggingface_hub and safetensors raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import transformers
from huggingface_hub import errors as hub

from firedistill.memory import LOADING, explained_memory, is_out_of_memory


class ModelError(ValueError):
    """A model, tokenizer or adapter cannot be used; the message says why and what to do."""


NO_WEIGHTS = (
    "{name} has no weights in safetensors files (model.safetensors, or model.safetensors.index.json and its shards). Opening pickled "
    "weights (*.bin, *.pt, *.pth) executes code stored in them, so they are not read. If you trust such a file, convert it once: load "
    "it with transformers and call save_pretrained"
)
_UNREACHABLE = (
    "{name} is not a folder and not in the local Hugging Face cache, and the hub cannot be reached. "
    "Check the name and the connection, or give a folder, a .gguf file, smollm2 or lab"
)
# The first match counts: a gated repository is also one that is not found.
_HUB_ERRORS = {
    hub.GatedRepoError: "{name} is gated: accept its licence on the Hugging Face hub, then run `hf auth login`",
    hub.RevisionNotFoundError: "{name} has no such revision on the Hugging Face hub",
    hub.RepositoryNotFoundError: "no folder and no model on the Hugging Face hub named {name} (private? run `hf auth login`)",
    hub.LocalEntryNotFoundError: _UNREACHABLE,
    ConnectionError: _UNREACHABLE,
}


@contextlib.contextmanager
def explain_errors(name: str, part: str) -> Iterator[None]:
    """Turn whatever the libraries raise while they read `part` of the model `name` into one line.

    Raises:
        ModelError: the files cannot be read.
        OutOfMemory: they do not fit into memory.
    """
    with explained_memory(f"loading {name} does not fit; {LOADING}"):
        try:
            yield
        except BaseException as error:
            # The Rust libraries panic at some malformed files, with an exception of a class of its own.
            of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
            if isinstance(error, ModelError) or is_out_of_memory(error) or not of_library:
                raise
            raise ModelError(explanation(name, part, error)) from error


def explanation(name: str, part: str, error: BaseException) -> str:
    """Why reading `part` of the model `name` failed: by the hub's error behind `error`, or else by the text of `error`."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for kind, text in _HUB_ERRORS.items():
        if any(isinstance(cause, kind) for cause in causes):
            return text.format(name=name)
    text = str(error)
    if "trust_remote_code" in text:
        return f"{name} needs code from its own repository, which firedistill never executes"
    if "model type" in text and "does not recognize" in text:
        return f"transformers {transformers.__version__} does not know the architecture of {name}; a newer version may"
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"cannot load {name}: reading {part} failed with {type(error).__name__}: {first_line}"
