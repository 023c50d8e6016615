"""Whether a run may continue from a checkpoint, and from which one.

A checkpoint records the settings of its run, fingerprints of the data, the base model and the tokenizer, and the machine. Settings
whose `firedistill.config.effect` is "place" or "none" may differ; any other difference is refused unless the caller allows it by name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerBase

from firedistill.coerce import read_yaml
from firedistill.config import OPEN, SelfDistillConfig, default_of, effect
from firedistill.models.sharding import reshard, whole
from firedistill.run.checkpoints import CheckpointError, all_checkpoints, check, newest_checkpoint
from firedistill.run.directory import finished_step, is_run
from firedistill.run.log import last_row
from firedistill.tasks.types import Example
from firedistill.terminal import nearest

logger = logging.getLogger(__name__)

SAMPLED_VALUES = 64  # of a parameter in a fingerprint; fingerprints of stored runs depend on it


# ---- What makes a run the same run -------------------------------------------------------------------------------------------


def data_fingerprint(examples: Sequence[Example]) -> str:
    """`<number of examples>:<hash of their texts>`."""
    parts = [(e.uid, e.question, str(e.answer), e.labels, e.options, e.solution, *filter(None, added(e))) for e in examples]
    return f"{len(examples)}:{digest(parts)}"


def added(example: Example) -> tuple[Any, ...]:
    """What only the rows of one's own data have; an example without it has the fingerprint of its other texts."""
    metadata = example.metadata if isinstance(example.metadata, Mapping) else {}
    judged_by = (steady(metadata.get(name)) for name in ("row", "tests", "setup"))
    return example.history, example.feedback, metadata.get("accepted"), metadata.get("kept"), *judged_by


def steady(value: Any) -> Any:
    """A value as something whose `repr` is the same in another process, whatever the addresses of objects and the order of sets."""
    if isinstance(value, Mapping):
        return [(steady(name), steady(item)) for name, item in value.items()]
    if isinstance(value, list | tuple):
        return [steady(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(steady(item)) for item in value)
    if is_dataclass(value):
        return [type(value).__name__, *(steady(getattr(value, declared.name)) for declared in fields(value))]
    return value if value is None or isinstance(value, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


@torch.no_grad()
def model_fingerprint(model: nn.Module) -> str:
    """A hash of the frozen parameters' names, shapes and dtypes, and of up to `SAMPLED_VALUES` evenly spaced values of each."""
    reshard(model)  # names and shapes are those of the checkpoint then
    parts: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            continue
        flat = whole(parameter.detach()).reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLED_VALUES)][:SAMPLED_VALUES]
        sample = sample.cpu() if sample.dtype == torch.uint8 else sample.float().cpu()
        parts.append((name, tuple(parameter.shape), str(parameter.dtype), sample.tolist()))
    return digest(parts)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the chat template and of all tokens with their ids."""
    return digest([tokenizer.chat_template, *sorted(tokenizer.get_vocab().items())])


def digest(parts: Sequence[Any]) -> str:
    """A short hash of texts and numbers."""
    total = hashlib.sha256()
    for part in parts:
        total.update(repr(part).encode("utf-8", "surrogatepass") + b"\n")
    return total.hexdigest()[:16]


def to_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON stores them, so that stored and present ones compare equal."""
    return json.loads(json.dumps(values, default=str))


# ---- Comparison with an earlier run ------------------------------------------------------------------------------------------


# Values used by older runs, which do not store these settings, where they are not the present defaults.
BEFORE_THE_OPTION = {"teacher_weights": "ema", "lora_dtype": "float32", "judge_file": None, "tokenizer": None}
# What says nothing: older runs do not store their tokenizers.
UNDECIDED = {**OPEN, "tokenizer": None}


def differences(stored: Mapping[str, Any], present: Mapping[str, Any], config: SelfDistillConfig) -> dict[str, str]:
    """What differs between two identities, as texts by name; settings that may differ or are not decided yet are left out.

    Args:
        config: its class has the default of a setting that is not stored.
    """
    defaults = {**_defaults(config), **BEFORE_THE_OPTION}
    before, now = ({**defaults, **part(run, "settings"), **part(run, "given")} for run in (stored, present))
    unknown = object()
    found = {}
    for name in dict.fromkeys([*before, *now]):
        values = [side.get(name, unknown) for side in (before, now)]
        undecided = name in UNDECIDED and UNDECIDED[name] in values
        if name == "lora_dtype" and now.get("model_dtype") == "float32":  # the type of the base is that of the factors
            continue
        if effect(name) in ("result", "rounding") and values[0] != values[1] and not undecided:
            old, new = ("unknown" if value is unknown else repr(value) for value in values)
            found[name] = f"{name} was {old}, is {new}"
    return found


def part(stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return found if isinstance(found := stored.get(name), Mapping) else {}


def _defaults(config: SelfDistillConfig) -> dict[str, Any]:
    return to_plain({f.name: default_of(f) for f in fields(config)})


def refuse_differences(
    folder: Path, stored: Mapping[str, Any], present: Mapping[str, Any], config: SelfDistillConfig, allowed: Sequence[str]
) -> dict[str, str]:
    """The differences between a checkpoint's run and the present one, all of which are allowed.

    Raises:
        CheckpointError: a difference is not allowed, or an allowed name is neither a setting nor a fingerprint.
    """
    check_allowed(present, config, allowed)
    found = differences(stored, present, config)
    refused = {name: text for name, text in found.items() if name not in allowed}
    if refused:
        raise CheckpointError(
            f"{folder} was made with other settings: {'; '.join(refused.values())}. Restore the old values, continue with the new "
            f"ones (--allow_changes {' '.join(refused)}), or start from the beginning with --overwrite or in another --output_dir "
            "(in Python: allow_changes=[...], resume_from_checkpoint=False, output_dir=...)"
        )
    return found


def check_allowed(present: Mapping[str, Any], config: SelfDistillConfig, allowed: Sequence[str]) -> None:
    """Raise CheckpointError if an allowed name is neither a setting nor a fingerprint."""
    given = part(present, "given")
    known = [*_defaults(config), *given]
    for name in allowed:
        if name not in known:
            hint = nearest(name, known) or f"; expected names of options, or of {', '.join(given)}"
            raise CheckpointError(f"--allow_changes {name}: there is no such name{hint}")


def refuse_another_run(run: Path, config: SelfDistillConfig, decided: Collection[str] = ()) -> None:
    """Raise CheckpointError if the folder holds a run without a checkpoint, which would be replaced, and with other settings.

    Args:
        decided: names of settings that may differ, because they were left open.
    """
    if all_checkpoints(run) or last_row(run / "metrics.jsonl") is None:
        return
    try:
        earlier = read_yaml(run / "config.yaml")
    except (OSError, ValueError):
        earlier = None
    if isinstance(earlier, dict):
        both = to_plain(earlier), to_plain(config.resolved())
        if all(settings.get("checkpoint_sampling") for settings in both):  # the file has the model's, which is not loaded yet
            for settings in both:
                settings |= {"top_k": None, "repetition_penalty": None}
        changed = differences({"settings": both[0]}, {"settings": both[1]}, config)
        texts = [text for name, text in changed.items() if name not in decided]
        what = f"with other settings and no checkpoint ({'; '.join(texts)})" if texts else ""
    else:
        what = "without a readable config.yaml and without a checkpoint"
    if what:
        raise CheckpointError(
            f"{run} already holds a run {what}: replace it with --overwrite, or choose another --output_dir (in Python: "
            "resume_from_checkpoint=False, output_dir=...)"
        )


def meaning(wanted: str | Path | bool | None) -> str | Path | bool | None:
    """What `resume_from_checkpoint` asks for, which recipes and command lines may name by a word."""
    words: dict[str, bool | None] = {"auto": None, "none": False, "true": True, "false": False}
    return words.get(wanted.lower(), wanted) if isinstance(wanted, str) else wanted


def choose(wanted: str | Path | bool | None, run: str | Path) -> Path | None:
    """The checkpoint to continue from, verified to be complete; None to start from the beginning.

    Args:
        wanted: True for the newest one of the run directory, which must exist; "auto" or None for the newest one if there is any;
            False for none; or the path of a checkpoint.

    Raises:
        TypeError: `wanted` is none of these.
        CheckpointError: there is no complete checkpoint, or it belongs to another run than the one in the run directory.
    """
    if not isinstance(wanted, str | os.PathLike | bool | None):
        raise TypeError(
            f"resume_from_checkpoint is a {type(wanted).__name__}: expected True, False, None, 'auto' or the path of a checkpoint"
        )
    wanted = meaning(wanted)
    if wanted is False:
        return None
    found = all_checkpoints(run)
    if wanted is None or wanted is True:
        newest = newest_checkpoint(run)
        if newest is None and wanted is None and not found and (step := finished_step(Path(run))) is not None:
            raise CheckpointError(
                f"{run} has ended after step {step} and has no checkpoint to resume from: --overwrite trains it again and removes what "
                "is there (in Python: resume_from_checkpoint=False)"
            )
        if newest is None and (wanted or found):
            raise CheckpointError(
                f"{run} has no complete checkpoint to resume from (found: {', '.join(path.name for path in found) or 'none'}); "
                "--overwrite starts from the beginning and removes what is there (in Python: resume_from_checkpoint=False)"
            )
        return newest
    folder = Path(wanted).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}; expected a folder checkpoint-<step>, or auto")
    if folder.resolve().parent != Path(run).resolve() and (found or is_run(Path(run))):
        fix = "resume the one that is there (--resume)" if found else "it has no checkpoint yet, so delete the folder"
        raise CheckpointError(
            f"{run} holds a run of its own, and {folder} belongs to another one: {fix}, or choose another --output_dir"
        )
    check(folder)
    return folder


def machine(device: torch.device) -> dict[str, Any]:
    """What changes the rounding of results; not part of the identity."""
    return {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def warn_of_another_machine(manifest: Mapping[str, Any], device: torch.device) -> None:
    """Log what differs from the machine that wrote the checkpoint."""
    before, now = part(manifest, "machine"), machine(device)
    changed = [f"{name} {before.get(name)!r}, now {value!r}" for name, value in now.items() if before.get(name) != value]
    if changed:
        logger.warning(
            "the checkpoint was written with %s: from here on, results equal those of an uninterrupted run only within rounding",
            "; ".join(changed),
        )
