"""Why a model, tokenizer or adapter cannot be used, in one sentence that says what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import transformers
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError


class ModelError(ValueError):
    """A model, tokenizer or adapter that cannot be used as asked; the message says why and what to do."""


def pickled(name: str) -> str:
    return (
        f"{name} has pickled weights only. Opening a pickle runs whatever code is in it, so only safetensors are read. "
        "If you trust the file, convert it once: load it with transformers and call save_pretrained"
    )


@contextlib.contextmanager
def explained(name: str, what: str) -> Iterator[None]:
    """Turn the loaders' many exceptions into one ModelError in plain words."""
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(_explain(name, what, error)) from error


def _explain(name: str, what: str, error: BaseException) -> str:
    causes: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in causes:
        causes.append(link)
        link = link.__cause__ or link.__context__
    text = str(error)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if caused_by(hub_errors.GatedRepoError):
        return f"{name} is gated: accept its licence on the Hugging Face hub, then run `hf auth login`"
    if caused_by(hub_errors.RevisionNotFoundError):
        return f"{name} has no such revision on the Hugging Face hub"
    if caused_by(hub_errors.RepositoryNotFoundError):
        return f"there is no folder and no model on the Hugging Face hub named {name} (or it is private: run `hf auth login`)"
    if caused_by(hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, ConnectionError) or (
        "couldn't connect" in text or "offline" in text.lower()
    ):
        return (
            f"{name} is not a folder, is not in the local Hugging Face cache, and the hub cannot be reached. "
            "Check the name and the connection, or give a folder, a .gguf file, smollm2 or lab"
        )
    if "trust_remote_code" in text:
        return f"{name} needs code from its own repository, which is never executed here"
    if "safetensors" in text and ("does not appear to have a file" in text or "no file named" in text.lower()):
        return pickled(name)
    if "model type" in text and "does not recognize" in text:
        return f"transformers {transformers.__version__} does not know the architecture of {name}; a newer version may"
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"cannot load {name}: reading {what} failed with {type(error).__name__}: {first_line}"
