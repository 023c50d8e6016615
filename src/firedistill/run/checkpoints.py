"""Checkpoints that are whole or not there, that are checked before they are read, and that hold no pickle.

A checkpoint is written into a hidden folder beside its place, brought to the disk, sealed with a list of its files (`checkpoint.json`:
sizes and SHA-256), and then renamed into its place. Whatever kills a run, `checkpoint-<step>` is complete or missing; one that was
damaged later, or copied by half, does not match its list and is never taken.

Tensors are stored as safetensors, everything else as JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from firedistill.files import REPLACED, UNFINISHED, discard

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be taken; the message says which, why, and what to do."""


# ---- The list of a checkpoint's files ----------------------------------------------------------------------------------------


def seal(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the list of all files of a finished folder, with `content` beside it; nothing may be written there afterwards."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({**content, "files": files}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `seal` wrote.

    Raises:
        CheckpointError: there is none, or it is not what `seal` writes.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not complete: it has no {MANIFEST}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read ({error})") from error
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} lists no files")
    return content


def check(folder: Path, contents: bool = True) -> dict[str, Any]:
    """The list of a complete checkpoint.

    Args:
        contents: compare the files' hashes too, not only their sizes.

    Raises:
        CheckpointError: the checkpoint is not complete, or not as it was written; names the file.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts:
            raise CheckpointError(f"{folder} is not to be trusted: {MANIFEST} names {name!r}, a file outside the checkpoint")
        path = folder / name
        if not path.is_file() or path.is_symlink():
            raise CheckpointError(f"{folder} is not complete: {name} is missing")
        if path.stat().st_size != entry.get("bytes") or (contents and sha256(path) != entry.get("sha256")):
            raise CheckpointError(f"{folder} is damaged: {name} is not what was written")
    return manifest


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- The checkpoints of a run ------------------------------------------------------------------------------------------------


def checkpoint_folder(run: str | Path, step: int) -> Path:
    return Path(run) / f"checkpoint-{step}"


def step_of(folder: str | Path) -> int:
    """The optimizer step of a checkpoint folder.

    Raises:
        CheckpointError: it is not called checkpoint-<step>.
    """
    found = re.fullmatch(r"checkpoint-(\d{1,12})", Path(folder).name)
    if found is None:
        raise CheckpointError(f"{folder} is no checkpoint: expected a folder named checkpoint-<step>")
    return int(found.group(1))


def all_checkpoints(run: str | Path) -> list[Path]:
    """The folders named checkpoint-<step>, complete or not, oldest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d{1,12}", path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest complete checkpoint, or None. Newer ones that are not complete are named in the log."""
    for folder in reversed(all_checkpoints(run)):
        try:
            check(folder)
        except CheckpointError as error:
            logger.warning("%s; it is not taken", error)
        else:
            return folder
    return None


def last_checkpoint(run: str | Path) -> str:
    """The newest complete checkpoint of a run directory.

    Raises:
        CheckpointError: there is none.
    """
    newest = newest_checkpoint(run)
    if newest is None:
        raise CheckpointError(f"{run} has no complete checkpoint to go on from; start the run anew")
    return str(newest)


def rotate(run: str | Path, keep: int | None, also: str | None = None) -> None:
    """Remove all but the newest `keep` complete checkpoints (None or 0: keep all), and never `also`.

    To be called when a new one is complete. Folders that are not complete do not count, and are left alone.
    """
    complete = []
    for folder in all_checkpoints(run):
        with suppress(CheckpointError):
            check(folder, contents=False)
            complete.append(folder)
    for folder in complete[: -keep if keep else 0]:
        if also is None or folder.resolve() != Path(also).resolve():
            discard(folder)


def remove_after(run: str | Path, step: int) -> None:
    """Remove the checkpoints, complete or not, of steps that the run will make again, and what a kill left unfinished."""
    for prefix in (UNFINISHED, REPLACED):
        for path in Path(run).glob(f"{prefix}*"):
            discard(path) if path.is_dir() else path.unlink(missing_ok=True)
    for folder in all_checkpoints(run):
        if step_of(folder) > step:
            discard(folder)


# ---- States without pickles --------------------------------------------------------------------------------------------------


def save_state(state: Any, folder: str | Path, name: str) -> None:
    """Write nested dicts, lists and tuples of numbers, texts, None and tensors as `<name>.json` and `<name>.safetensors`.

    Raises:
        TypeError: something else is in it.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = str(len(tensors))
            tensors[key] = value.detach().cpu().clone().contiguous()  # each with memory of its own
            return {"tensor": key}
        if isinstance(value, Mapping):
            return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
        if isinstance(value, tuple):
            return {"tuple": [plain(item) for item in value]}
        if isinstance(value, list):
            return [plain(item) for item in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{name} holds a {type(value).__name__}, which a checkpoint cannot hold: use numbers, texts or tensors")

    text = json.dumps(plain(state))
    save_file(tensors, Path(folder) / f"{name}.safetensors")
    (Path(folder) / f"{name}.json").write_text(text, encoding="utf-8")


def load_state(folder: str | Path, name: str) -> Any:
    """What `save_state` wrote, tensors on the CPU.

    Raises:
        CheckpointError: the files are missing or not what `save_state` writes.
    """
    path = Path(folder) / f"{name}.json"
    try:
        tensors = load_file(Path(folder) / f"{name}.safetensors")

        def restored(value: Any) -> Any:
            if isinstance(value, list):
                return [restored(item) for item in value]
            if not isinstance(value, dict):
                return value
            ((kind, content),) = value.items()
            if kind == "tensor":
                return tensors[content].clone()
            if kind == "dict":
                return {restored(key): restored(item) for key, item in content}
            if kind == "tuple":
                return tuple(restored(item) for item in content)
            raise ValueError(f"unknown entry {kind!r}")

        return restored(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}); take an earlier checkpoint") from error


def random_state() -> dict[str, Any]:
    """The state of every global random generator of this process."""
    numbers = cast(tuple[str, numpy.ndarray, int, int, float], numpy.random.get_state())
    kind, keys, position, has_gauss, gauss = numbers
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` took. A state of another kind of device is left out.

    Raises:
        CheckpointError: it is no such state.
    """
    try:
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, gauss))
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's random state is not one ({error}); take an earlier checkpoint") from error


def to_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them, so that stored ones and those of today compare equal."""
    return json.loads(json.dumps(values, default=str))


def digest(parts: Sequence[Any]) -> str:
    """A short fingerprint of texts and numbers."""
    total = hashlib.sha256()
    for part in parts:
        total.update(repr(part).encode("utf-8", "surrogatepass") + b"\n")
    return total.hexdigest()[:16]
