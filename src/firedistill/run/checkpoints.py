"""Checkpoints on disk: complete or absent, verified before they are read, and without pickles.

A checkpoint is written to a hidden folder, synced, sealed with a manifest of its files (`checkpoint.json`: sizes and SHA-256), and
renamed to `checkpoint-<step>`. A run that is killed leaves complete checkpoints only; one that is damaged or truncated later does not
match its manifest and is not used.

Tensors are stored as safetensors, everything else as JSON.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from firedistill.files import REPLACED, UNFINISHED, discard, naming, read_json, sha256
from firedistill.run.directory import CHECKPOINT, remove

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says which one, why, and what to do."""


def seal(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest: `content` and the list of all files in the folder. Nothing may be written there afterwards."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({**content, "files": files}, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest that `seal` wrote.

    Raises:
        CheckpointError: it is missing or malformed.
        OSError: the system cannot read it.
    """
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder} is not complete: it has no {MANIFEST}")
    content = read_json(folder / MANIFEST, CheckpointError)
    files = content.get("files")
    if not isinstance(files, dict) or not files or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} lists no files")
    return content


def check(folder: Path, contents: bool = True) -> dict[str, Any]:
    """Compare a checkpoint with its manifest, and return the manifest.

    Args:
        contents: compare the hashes of the files, not only their sizes.

    Raises:
        CheckpointError: a file is missing or differs; names it.
        OSError: the system cannot read one.
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


# ---- The checkpoints of a run ------------------------------------------------------------------------------------------------


def checkpoint_folder(run: str | Path, step: int) -> Path:
    return Path(run) / f"checkpoint-{step}"


def step_of(folder: str | Path) -> int:
    """The optimizer step in the name of a checkpoint folder; raises CheckpointError if it has another name."""
    found = CHECKPOINT.fullmatch(Path(folder).name)
    if found is None:
        raise CheckpointError(f"{folder} is not a checkpoint: expected a folder named checkpoint-<step>")
    return int(found.group(1))


def all_checkpoints(run: str | Path) -> list[Path]:
    """The folders named checkpoint-<step>, complete or not, oldest first."""
    return sorted(
        (path for path in Path(run).glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()), key=step_of
    )


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest complete checkpoint, or None. Logs the newer ones that it skips.

    Raises:
        OSError: the system cannot read a newer one, which may be complete.
    """
    for folder in reversed(all_checkpoints(run)):
        try:
            check(folder)
        except CheckpointError as error:
            logger.warning("%s; it is not used", error)
        else:
            return folder
    return None


def rotate(run: str | Path, keep: int | None) -> None:
    """Remove the complete checkpoints except the newest `keep` ones (None, 0 or less: keep all)."""
    complete = []
    for folder in all_checkpoints(run):
        with suppress(CheckpointError, OSError):
            check(folder, contents=False)
            complete.append(folder)
    for folder in complete[:-keep] if keep is not None and keep > 0 else []:
        discard(folder)


def remove_after(run: str | Path, step: int) -> None:
    """Remove the checkpoints, complete or not, of later steps than `step`, and leftovers of a killed process."""
    for prefix in (UNFINISHED, REPLACED):
        for path in Path(run).glob(f"{prefix}*"):
            remove(path)
    for folder in all_checkpoints(run):
        if step_of(folder) > step:
            discard(folder)


# ---- States without pickles --------------------------------------------------------------------------------------------------


def save_state(state: Any, folder: str | Path, name: str) -> None:
    """Write nested dicts, lists and tuples of tensors and JSON scalars as `<name>.json` and `<name>.safetensors`.

    Raises TypeError if the state holds a value of another type.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = str(len(tensors))
            tensors[key] = value.detach().cpu().clone().contiguous()  # safetensors refuses shared memory
            return {"tensor": key}
        if isinstance(value, Mapping):
            return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
        if isinstance(value, tuple):
            return {"tuple": [plain(item) for item in value]}
        if isinstance(value, list):
            return [plain(item) for item in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{name} holds a {type(value).__name__}; a checkpoint can hold numbers, texts and tensors")

    text = json.dumps(plain(state))
    save_file(tensors, Path(folder) / f"{name}.safetensors")
    (Path(folder) / f"{name}.json").write_text(text, encoding="utf-8")


def load_state(folder: str | Path, name: str) -> Any:
    """The state that `save_state` wrote, tensors on the CPU; raises CheckpointError if a file is missing or malformed."""
    path = Path(folder) / f"{name}.json"

    def restored(entry: dict[str, Any]) -> Any:
        ((kind, content),) = entry.items()
        return tensors[content].clone() if kind == "tensor" else {"dict": dict, "tuple": tuple}[kind](content)

    try:
        with naming(Path(folder) / f"{name}.safetensors"):
            tensors = load_file(Path(folder) / f"{name}.safetensors")
        return json.loads(path.read_text(encoding="utf-8"), object_hook=restored)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}); use an earlier checkpoint") from error


def random_state() -> dict[str, Any]:
    """The states of all global random generators of this process."""
    numbers = cast(tuple[str, numpy.ndarray, int, int, float], numpy.random.get_state())
    kind, keys, position, has_gauss, gauss = numbers
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # a run on the CPU leaves GPUs alone
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned, without CUDA's state where no GPU is used; raises CheckpointError."""
    try:
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, gauss))
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_initialized() and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
    except Exception as error:  # what NumPy and PyTorch raise for values that are not states
        raise CheckpointError(f"the checkpoint's random state is malformed ({error}); use an earlier checkpoint") from error
