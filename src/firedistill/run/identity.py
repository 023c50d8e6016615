"""Which checkpoint a run goes on from, and whether it is the same run.

A checkpoint knows the settings it was made with, fingerprints of the data and of the base model, and the machine. Settings that
cannot change what is computed may differ; any other difference is refused unless it is allowed by name.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from firedistill.run.checkpoints import (
    CheckpointError,
    all_checkpoints,
    check,
    digest,
    last_checkpoint,
    newest_checkpoint,
    to_plain,
)
from firedistill.tasks.types import Example

logger = logging.getLogger(__name__)

# What may differ without a word: where things are and how they are shown, when checkpoints and evaluations are made. `model`,
# `data_dir` and `initial_adapter` are places; what stood there is compared by its fingerprint, or is in the checkpoint.
# fmt: off
HARMLESS = frozenset({
    "output_dir", "model", "data_dir", "initial_adapter", "eval_batch_size", "eval_steps", "save_steps",
    "save_total_limit", "save_strategy", "log_rollouts", "attribution_examples", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "logging_steps", "logging_first_step", "logging_nan_inf_filter",
    "logging_strategy", "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "push_to_hub",
    "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",
    "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_pin_memory",
    "ddp_timeout", "ddp_backend", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers", "use_cpu", "skip_memory_metrics", "resume_from_checkpoint", "task_timeout",
})
# fmt: on
MISSING_VALUE = object()


@dataclass(frozen=True)
class Difference:
    """A setting or fingerprint that is not what it was; `before` and `now` are texts."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} was {self.before}, is {self.now}"


def identity(
    settings: Mapping[str, Any],
    train: Sequence[Example],
    evaluation: Sequence[Example],
    base_model: str,
    world_size: int,
) -> dict[str, Any]:
    """What makes a run this run, as plain JSON values: its settings, and what it was given.

    Args:
        settings: `SelfDistillConfig.resolved()`.
        base_model: see `model_fingerprint`.
        world_size: processes.
    """
    return to_plain(
        {
            "settings": dict(settings),
            "given": {
                "base_model": base_model,
                "train_data": data_fingerprint(train),
                "eval_data": data_fingerprint(evaluation),
                "world_size": world_size,
            },
        }
    )


def machine(device: torch.device) -> dict[str, Any]:
    """What changes rounding: not part of the identity, but said when it differs."""
    return {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def data_fingerprint(examples: Sequence[Example]) -> str:
    """`<number of examples>:<hash of their texts>`."""
    return f"{len(examples)}:{digest([(e.uid, e.question, str(e.answer), e.labels, e.options, e.solution) for e in examples])}"


@torch.no_grad()
def model_fingerprint(model: nn.Module, values: int = 64) -> str:
    """Names, shapes and types of the frozen parameters, and some values of each: enough to tell two base models apart."""
    parts: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            continue
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // values)][:values]
        sample = sample.cpu() if sample.dtype == torch.uint8 else sample.float().cpu()
        parts.append((name, tuple(parameter.shape), str(parameter.dtype), sample.tolist()))
    return digest(parts)


def differences(stored: Mapping[str, Any], present: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Difference]:
    """What differs between two identities; harmless settings are left out.

    Args:
        defaults: of the settings; one that is not stored had its default.
    """
    found = []
    parts: tuple[tuple[str, Mapping[str, Any]], ...] = (("settings", defaults), ("given", {}))
    for part, fallback in parts:
        before, now = (_mapping(values.get(part)) for values in (stored, present))
        for name in dict.fromkeys([*before, *now]):
            if name in HARMLESS and part == "settings":
                continue
            old, new = (values.get(name, fallback.get(name, MISSING_VALUE)) for values in (before, now))
            if old != new:
                found.append(Difference(name, *("unknown" if v is MISSING_VALUE else repr(v) for v in (old, new))))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def defaults_of(config: Any) -> dict[str, Any]:
    """The default of every setting, as plain JSON values."""
    values = {f.name: f.default if f.default is not MISSING else None for f in fields(config)}
    values |= {f.name: f.default_factory() for f in fields(config) if f.default_factory is not MISSING}
    return to_plain(values)


def refuse_differences(
    stored: Mapping[str, Any], present: Mapping[str, Any], defaults: Mapping[str, Any], allowed: Sequence[str], where: str
) -> list[Difference]:
    """The differences, all of them allowed.

    Raises:
        CheckpointError: some are not allowed; lists them and says what can be done. Or a name that is allowed exists nowhere.
    """
    given = present.get("given") or {}
    known = [*defaults, *given]
    for name in allowed:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; it takes names of options, and {', '.join(given)}"
            raise CheckpointError(f"--allow_changes {name}: there is no such name{hint}")
    found = differences(stored, present, defaults)
    refused = [difference for difference in found if difference.name not in allowed]
    if refused:
        names = " ".join(difference.name for difference in refused)
        raise CheckpointError(
            f"{where} was made with other settings: {'; '.join(map(str, refused))}. Give it the old values, "
            f"or go on with the new ones by name (--allow_changes {names}), or start anew with --overwrite or in another "
            "--output_dir (in Python: allow_changes=[...], resume_from_checkpoint=False, output_dir=...)"
        )
    return found


def choose(wanted: str | Path | bool | None, run: str | Path) -> Path | None:
    """The checkpoint to go on from, checked to be complete; None to start anew.

    Args:
        wanted: True for the newest of the run directory, which must have one; "auto" or None for the newest if there is one;
            False for none; or the path of a checkpoint.

    Raises:
        CheckpointError: there is no complete one.
    """
    if isinstance(wanted, str) and wanted.lower() in {"auto", "true", "false", "none"}:
        wanted = {"auto": None, "true": True, "false": False, "none": False}[wanted.lower()]
    if wanted is False:
        return None
    if wanted is None:
        newest = newest_checkpoint(run)
        if newest is None and (found := all_checkpoints(run)):
            raise CheckpointError(
                f"{run} holds {', '.join(path.name for path in found)}, but no complete checkpoint to go on from; --overwrite starts "
                "anew and removes them (in Python: resume_from_checkpoint=False)"
            )
        return newest
    if wanted is True:
        return Path(last_checkpoint(run))
    if not Path(wanted).is_dir():
        raise CheckpointError(f"there is no checkpoint {wanted}; give a folder checkpoint-<step>, or auto")
    if Path(wanted).resolve().parent != Path(run).resolve() and (
        all_checkpoints(run) or (Path(run) / "metrics.jsonl").exists()
    ):
        raise CheckpointError(
            f"{run} holds a run of its own, and {wanted} is another one's: go on with the one that is there (--resume), or name "
            "another --output_dir"
        )
    check(Path(wanted))
    return Path(wanted)


def stored_settings(run: str | Path) -> dict[str, Any] | None:
    """The settings in a run directory's `config.yaml`; None if there are none to be read."""
    try:
        values = yaml.safe_load((Path(run) / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return to_plain(values) if isinstance(values, dict) else None


def warn_of_another_machine(before: Any, now: Mapping[str, Any]) -> None:
    """Say what differs in the machine: the continued run is then the same one within rounding, not to the bit."""
    before = before if isinstance(before, Mapping) else {}
    changed = [f"{name} {before.get(name)!r}, now {value!r}" for name, value in now.items() if before.get(name) != value]
    if changed:
        logger.warning(
            "the checkpoint was written with %s: from here on, the results equal those of the uninterrupted run only within rounding",
            "; ".join(changed),
        )
