"""LoRA adapters: put new factors on a model, or continue from saved ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from firedistill.models import LORA_TARGET_MODULES
from firedistill.models.errors import ModelError


def add_lora(
    model: PreTrainedModel,
    *,
    r: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    target_modules: Sequence[str] = LORA_TARGET_MODULES,
) -> PeftModel:
    """Put new LoRA factors on the linear layers of `model`: float32 whatever the dtype of the base, no biases.

    Raises:
        ModelError: a name in `target_modules` matches no linear layer. peft raises only if none of them does, and would
            silently leave, say, the attention of a model with a fused `qkv_proj` untrained.
    """
    layers = _linear_layers(model)
    missing = [target for target in target_modules if not any(f".{name}".endswith(f".{target}") for name in layers)]
    if missing:
        known = sorted({name.rpartition(".")[2] for name in layers})
        raise ModelError(f"no linear layer is named {', '.join(missing)}; this model has {', '.join(known)}")
    config = LoraConfig(
        task_type="CAUSAL_LM", r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(target_modules), bias="none"
    )
    return get_peft_model(model, config, revision=getattr(model, "firedistill_revision", None))


def load_adapter(model: PreTrainedModel, path: str | os.PathLike[str], *, check_base: bool = True) -> PeftModel:
    """Put a saved LoRA adapter on `model`; its factors are trainable and float32.

    Args:
        model: the base, without adapter.
        path: a folder that `save_pretrained` of a peft model has written.
        check_base: refuse an adapter that names another base model, even if its shapes fit.

    Raises:
        ModelError: the folder is not a LoRA adapter, belongs to another base model, or contradicts itself. `model` is
            unchanged then.
    """
    folder = Path(path).expanduser()
    config = _adapter_config(folder)
    base, here = config.get("base_model_name_or_path"), model.name_or_path
    if check_base and base and here and _base_label(base) != _base_label(here):
        raise ModelError(
            f"the adapter in {folder} was made for {base}, not for {here}. If these are the same weights under another "
            "name, correct base_model_name_or_path in its adapter_config.json"
        )
    _check_shapes(model, folder, config)
    return PeftModel.from_pretrained(model, str(folder.resolve()), is_trainable=True)


def _linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """All modules with the interface of a linear layer; this includes 4-bit ones, whose weights are stored packed."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "in_features") and hasattr(m, "out_features")}


def _adapter_config(folder: Path) -> dict[str, Any]:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} is not an adapter: it has no {name} (pickled adapters are not read)")
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{folder / 'adapter_config.json'} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{folder} is not a LoRA adapter")
    return config


def _base_label(name: str) -> str:
    """The part of a model's name that survives moving its folder; for a snapshot in the hub's cache, the name on the hub."""
    snapshot = re.search(r"models--([^/\\]+)", name)
    return (snapshot[1].split("--") if snapshot else re.split(r"[/\\]", name.rstrip("/\\")))[-1].lower()


def _check_shapes(model: torch.nn.Module, folder: Path, config: dict[str, Any]) -> None:
    """Compare the shapes of the saved factors with the layers of `model`.

    peft ignores factors of layers that the model lacks, and finds other mismatches only after it has changed the model.
    """
    file = folder / "adapter_model.safetensors"
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged: {error}") from error
    if not any(".lora_A." in key for key in shapes):
        raise ModelError(f"{folder} holds no LoRA factors")
    layers = _linear_layers(model)
    ranks = {config.get("r"), *(config.get("rank_pattern") or {}).values()}
    other_base = f"the adapter in {folder} was made for another base model"
    for key, shape in shapes.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        if match is None:
            continue
        name, factor = match.groups()
        if name not in layers:
            raise ModelError(f"{other_base}: this model has no linear layer {name}")
        rank, width = shape if factor == "A" else shape[::-1]
        expected = layers[name].in_features if factor == "A" else layers[name].out_features
        if width != expected:
            raise ModelError(f"{other_base}: {name} has {expected} features in this model, {width} in the adapter")
        if rank not in ranks:
            raise ModelError(f"{folder} contradicts itself: its config says rank {config.get('r')}, {name} has rank {rank}")
