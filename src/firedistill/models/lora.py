"""LoRA adapters: a new one, or one that was saved."""

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
    """Put fresh LoRA factors on the linear layers of `model`: fp32 over whatever dtype the base has, no biases.

    Raises:
        ModelError: a name in `target_modules` fits no linear layer. peft only objects when none of them does, and would
            leave, say, the attention of a model with a fused `qkv_proj` untrained without a word.
    """
    _check_targets(model, target_modules)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(target_modules),
        bias="none",
    )
    revision = getattr(model, "firedistill_revision", None)
    return get_peft_model(model, config, autocast_adapter_dtype=True, revision=revision)


def load_adapter(model: PreTrainedModel, path: str | os.PathLike[str], *, check_base: bool = True) -> PeftModel:
    """Continue training from a saved LoRA adapter: its factors on `model`, trainable, in fp32.

    Args:
        model: the base, without adapter.
        path: a folder that `save_pretrained` of a peft model has written.
        check_base: refuse an adapter that names another base model, even if its shapes would fit.

    Raises:
        ModelError: the folder is not a LoRA adapter, or it was made for another base model or contradicts itself.
    """
    folder = Path(path).expanduser()
    config = _adapter_config(folder)
    base, here = config.get("base_model_name_or_path"), model.name_or_path
    if check_base and base and here and _base_label(base) != _base_label(here):
        raise ModelError(
            f"the adapter in {folder} was made for {base}, not for {here}. If these are the same weights under another "
            "name, correct base_model_name_or_path in its adapter_config.json"
        )
    _check_adapter_shapes(model, folder, config)
    return PeftModel.from_pretrained(model, str(folder.resolve()), is_trainable=True, autocast_adapter_dtype=True)


def _linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """All modules with the shape of a linear layer; 4-bit ones count, although their weight is stored packed."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "in_features") and hasattr(m, "out_features")}


def _check_targets(model: torch.nn.Module, targets: Sequence[str]) -> None:
    names = _linear_layers(model)
    missing = [target for target in targets if not any(name == target or name.endswith(f".{target}") for name in names)]
    if missing:
        known = sorted({name.rpartition(".")[2] for name in names})
        raise ModelError(f"no linear layer is named {', '.join(missing)}; this model has {', '.join(known)}")


def _adapter_config(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise ModelError(f"{folder} is not an adapter: it has no adapter_config.json")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder} has no adapter_model.safetensors (pickled adapters are not read)")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{folder} is not a LoRA adapter")
    return config


def _base_label(name: str) -> str:
    """What stays of a model's name when the folder that holds it has moved; a hub snapshot gives the hub's name."""
    snapshot = re.search(r"models--([^/\\]+)", name)
    return snapshot.group(1).split("--")[-1].lower() if snapshot else re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()


def _check_adapter_shapes(model: torch.nn.Module, folder: Path, config: dict[str, Any]) -> None:
    """Compare the header of the saved factors with the layers of `model`; reads no weights."""
    layers = _linear_layers(model)
    ranks = {config.get("r"), *(config.get("rank_pattern") or {}).values()}
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ModelError(f"{folder / 'adapter_model.safetensors'} is damaged: {error}") from error
    other_base = f"the adapter in {folder} was made for another base model"
    for key, shape in shapes.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        if match is None:
            continue
        name, factor = match.groups()
        layer = layers.get(name)
        if layer is None:
            raise ModelError(f"{other_base}: there is no linear layer {name}")
        rank, width = (shape[0], shape[1]) if factor == "A" else (shape[1], shape[0])
        expected = layer.in_features if factor == "A" else layer.out_features
        if width != expected:
            raise ModelError(f"{other_base}: {name} has {expected} features there, {width} in the adapter")
        if rank not in ranks:
            raise ModelError(f"{folder} contradicts itself: its config says rank {config.get('r')}, {name} has rank {rank}")
    if not any(".lora_A." in key for key in shapes):
        raise ModelError(f"{folder} holds no LoRA factors")
