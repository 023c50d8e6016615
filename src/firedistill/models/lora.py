"""LoRA adapters: put new factors on a model, or continue from saved ones."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from firedistill.files import naming, read_json
from firedistill.models import LORA_TARGET_MODULES
from firedistill.models.errors import ModelError
from firedistill.models.sharding import shown_whole
from firedistill.terminal import some

FACTORS = "adapter_model.safetensors"
# Settings that decide what the product of given factors adds to the base model
SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


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
            silently leave, say, the attention of a model with a fused `qkv_proj` untrained. Also if peft refuses these layers, or
            adapts the experts of a mixture of experts in place of them.
    """
    layers = _linear_layers(model)
    known_endings = {ending for name in layers for ending in _endings(name)}
    missing = [target for target in target_modules if target not in known_endings]
    if missing:
        known = sorted({name.rpartition(".")[2] for name in layers})
        raise ModelError(f"no linear layer is named {', '.join(missing)}; this model has {', '.join(known)}")
    config = LoraConfig(
        task_type="CAUSAL_LM", r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(target_modules), bias="none"
    )
    return _adapted(model, config)


def load_adapter(model: PreTrainedModel, path: str | os.PathLike[str]) -> PeftModel:
    """Put a saved LoRA adapter on `model`; its factors are trainable and float32.

    Args:
        model: the base, without adapter.
        path: a folder that `save_pretrained` of a peft model has written.

    Raises:
        ModelError: the folder is not a LoRA adapter, has a setting that is not supported, belongs to another base model, or holds other
            tensors than the finite LoRA factors of the layers that it declares. `model` is unchanged then.
    """
    folder = Path(path).expanduser()
    settings = read_adapter_settings(folder)
    base, here = settings.pop("base_model_name_or_path", None), model.name_or_path
    revision = settings.pop("revision", None) or "main"
    loaded = getattr(model, "firedistill_revision", revision) or "main"
    if base and here and _base_label(base) != _base_label(here):
        raise ModelError(
            f"the adapter in {folder} was made for {base}, not for {here}. If these are the same weights under another "
            "name, correct base_model_name_or_path in its adapter_config.json"
        )
    if here and revision != loaded and not Path(here).is_dir():
        raise ModelError(
            f"the adapter in {folder} was made for revision {revision} of {here}, not for {loaded}: say which by --model_revision"
        )
    factors = read_factors(
        folder / FACTORS, _declared_factors(model, f"the adapter in {folder} was made for another base model", settings)
    )
    adapted = _adapted(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    set_peft_model_state_dict(adapted, factors)
    return adapted


def read_factors(file: Path, expected: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The tensors of an adapter, on the CPU.

    peft would also load tensors of the base model from this file, and would leave missing factors at their initial values.

    Args:
        file: `adapter_model.safetensors`.
        expected: shapes by name in the file. The file must hold these tensors and no others.

    Raises:
        ModelError: the file is missing or damaged; a tensor is missing, unexpected, of another shape, not floating-point or not finite.
    """
    try:
        with naming(file):
            factors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is damaged or cannot be read: {error}") from error
    if foreign := sorted(factors.keys() - expected.keys()):
        raise ModelError(
            f"{file} holds {some(foreign)}: not a LoRA factor of a layer that the adapter declares and the base model has. "
            "Use the base model of the adapter; tensors of the base model itself are not read from an adapter"
        )
    if missing := sorted(expected.keys() - factors.keys()):
        raise ModelError(f"{file} is not complete: it lacks {some(missing)}")
    for name, tensor in factors.items():
        if list(tensor.shape) != list(expected[name]):
            raise ModelError(
                f"{file} does not fit: {name} has shape {list(tensor.shape)}, base model and adapter settings give "
                f"{list(expected[name])}; use the base model and the settings with which the adapter was saved"
            )
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ModelError(f"{file} cannot be used: {name} holds values that are not finite numbers; use an earlier adapter")
    return factors


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors by the names in `adapter_model.safetensors`, as `save_pretrained` writes them.

    peft would gather the weights of a base model that is spread over processes, which all of them must do together.
    """
    own = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    return get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)


def scaling_changes(model: PeftModel, folder: Path) -> dict[str, str]:
    """What scales the factors of a saved adapter otherwise than those of the model's, as texts by name of the setting.

    Raises:
        ModelError: as `read_adapter_settings`.
    """
    saved, present = (LoraConfig(**read_adapter_settings(folder)), model.peft_config[model.active_adapters[0]])
    values = {name: (getattr(saved, name), getattr(present, name)) for name in SCALING}
    return {name: f"{name} was {old!r}, is {new!r}" for name, (old, new) in values.items() if old != new}


def trained_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name. From a `state_dict`, peft would gather a base model that is spread over processes."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def sort_targets(model: PeftModel) -> PeftModel:
    """Sort the target modules of all adapters, in place. peft keeps a set and writes it in an order that differs between processes."""
    for config in model.peft_config.values():
        if isinstance(targets := getattr(config, "target_modules", None), set):
            cast(LoraConfig, config).target_modules = sorted(targets)
    return model


def _adapted(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    with shown_whole(model), warnings.catch_warnings():
        # peft 0.21 asks a model for what newer versions of transformers than 5.16 have renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        targets = set(cast(Sequence[str], config.target_modules))
        try:
            adapted = cast(PeftModel, get_peft_model(model, config, revision=getattr(model, "firedistill_revision", None)))
        except ValueError as error:
            raise ModelError(f"peft cannot adapt {', '.join(sorted(targets))} of this model: {error}") from error
        if renamed := targets.difference(cast(Sequence[str], config.target_modules)):
            adapted.unload()
            raise ModelError(
                f"of this mixture of experts, peft adapts the experts in place of the linear layers {', '.join(sorted(renamed))}, "
                f"and experts are not supported; adapt {', '.join(sorted(targets - renamed)) or 'other layers'} only "
                "(lora_target_modules)"
            )
    return sort_targets(adapted)


def _linear_layers(model: torch.nn.Module) -> dict[str, Any]:
    """All modules with the interface of a linear layer; this includes 4-bit ones, whose weights are stored packed."""
    layers = {name: getattr(m, "base_layer", m) for name, m in model.named_modules()}  # below an adapter that is there already
    return {name: m for name, m in layers.items() if hasattr(m, "in_features") and hasattr(m, "out_features")}


def _endings(layer: str) -> list[str]:
    """The names by which a target or a pattern can mean a layer: its own, and every part of it that follows a dot."""
    parts = layer.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


# ---- Settings of a saved adapter ---------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e9


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_name(value: Any) -> bool:
    """Letters, digits, underscores and dots: peft reads patterns as regular expressions, of which these take no time."""
    return isinstance(value, str) and re.fullmatch(r"[\w.]{1,1000}", value) is not None


def _is_pattern(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(_is_name(name) and fits(of_name) for name, of_name in value.items())


# What is taken from adapter_config.json: what a value must be, and the check.
_TAKEN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number above 0", _is_rank),
    "lora_alpha": ("a number above 0, at most 1e9", _is_number),
    "target_modules": (
        "a list of names of linear layers; regular expressions are not read",
        lambda value: isinstance(value, list) and len(value) > 0 and all(map(_is_name, value)),
    ),
    "lora_dropout": ("a number from 0 to below 1", lambda value: type(value) in (int, float) and 0 <= value < 1),
    "use_rslora": ("true or false", lambda value: isinstance(value, bool)),
    "rank_pattern": ("plain names of layers with a whole number above 0 each", lambda value: _is_pattern(value, _is_rank)),
    "alpha_pattern": ("plain names of layers with a number above 0 each", lambda value: _is_pattern(value, _is_number)),
    "base_model_name_or_path": ("text", lambda value: isinstance(value, str)),
    "revision": ("text", lambda value: isinstance(value, str)),
}
_REQUIRED = ("r", "lora_alpha", "target_modules")
# Descriptions without an effect on what is computed, whatever their values
_DESCRIPTIONS = {"peft_type", "peft_version", "inference_mode", "auto_mapping"}
# Values beyond peft's default that change nothing: the saved factors replace the initial ones.
_HARMLESS = {"init_lora_weights": (True, False, "gaussian"), "task_type": (None, "CAUSAL_LM")}


def read_adapter_settings(folder: Path) -> dict[str, Any]:
    """The settings of a saved LoRA adapter, as keyword arguments of `LoraConfig`.

    Some settings make peft import modules, run regular expressions or change the base model. What is read is therefore an allow-list;
    every other setting must be off.

    Raises:
        ModelError: the folder is not a LoRA adapter, or a setting is missing, malformed or not supported; names it.
    """
    for name in ("adapter_config.json", FACTORS):
        if not (folder / name).is_file():
            inside = next(
                (path for path in (folder / "adapter", *folder.glob("checkpoint-*")) if (path / name).is_file()), None
            )
            hint = f"; did you mean {inside}?" if inside is not None else " (pickled adapters are not read)"
            raise ModelError(f"{folder} is not an adapter: it has no {name}{hint}")
    file = folder / "adapter_config.json"
    config = read_json(file, ModelError)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{folder} is not a LoRA adapter")
    return supported_settings(config, str(file))


def supported_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What is read of the settings of a LoRA adapter, as keyword arguments of `LoraConfig`.

    Args:
        where: names the settings in errors.

    Raises:
        ModelError: a setting is missing, malformed or not supported; names it.
    """
    if missing := [key for key in _REQUIRED if key not in config]:
        raise ModelError(f"{where} has no {', '.join(missing)}")
    defaults = {field.name: field.default for field in dataclasses.fields(LoraConfig)}
    settings = {key: config[key] for key in _TAKEN if key in _REQUIRED or config.get(key) is not None}
    for key, value in config.items():
        if key in settings:
            expected, fits = _TAKEN[key]
            if not fits(value):
                raise ModelError(f"{where}: {key} is {_short(value)}; expected {expected}")
        elif key not in _DESCRIPTIONS and not _is_among(value, _HARMLESS.get(key, (None, False, [], {}, defaults.get(key)))):
            raise ModelError(
                f"{where}: {key} is {_short(value)}, which is not supported. Supported are plain LoRA factors of linear layers, which "
                "leave the base model as it is"
            )
    return settings


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    """Whether it is one of the values, of the same type: 0 is not false."""
    return any(type(value) is type(other) and value == other for other in values)


def check_adapter(model: PeftModel) -> None:
    """Refuse an adapter that `load_adapter` would not read back.

    Raises:
        ModelError: a setting is not supported, names a layer that is not linear, or does not give one rank and one alpha to each layer.
    """
    (config,) = model.peft_config.values()
    plain = {  # as in its file
        key: sorted(value) if isinstance(value, set) else value.value if isinstance(value, enum.Enum) else value
        for key, value in config.to_dict().items()
    }
    settings = supported_settings(plain, "the model's adapter")
    declared = _declared_factors(model.get_base_model(), "the model's adapter cannot be read back", settings)
    factors = get_peft_model_state_dict(model, save_embedding_layers=False)
    if {name: list(factor.shape) for name, factor in factors.items()} != declared:
        raise ModelError("the model's adapter cannot be read back: its factors are not those that its settings declare")
    # peft takes the first pattern that fits, and writes them in another order.
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = settings.get(key, {})
        for layer in declared:
            endings = _endings(layer.removeprefix("base_model.model.").rpartition(".lora_")[0])
            if len({value for name, value in pattern.items() if name in endings}) > 1:
                raise ModelError(
                    f"the model's adapter cannot be read back: {key} has two values for {layer.rpartition('.lora_')[0]}"
                )


def _declared_factors(model: torch.nn.Module, where: str, settings: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Shapes of the factors that the settings of an adapter declare for `model`, by their names in a file."""
    layers = {name: (layer, set(_endings(name))) for name, layer in _linear_layers(model).items()}
    known = set().union(*(endings for _, endings in layers.values()))
    for key in ("target_modules", "rank_pattern", "alpha_pattern"):
        if unknown := [name for name in settings.get(key, ()) if name not in known]:
            raise ModelError(f"{where}: {key} names {some(unknown)}, and this model has no such linear layer")
    targets, ranks = set(settings["target_modules"]), settings.get("rank_pattern", {})
    expected: dict[str, Sequence[int]] = {}
    for name, (layer, endings) in layers.items():
        if targets & endings:
            rank = next((ranks[pattern] for pattern in ranks if pattern in endings), settings["r"])
            expected[f"base_model.model.{name}.lora_A.weight"] = [rank, layer.in_features]
            expected[f"base_model.model.{name}.lora_B.weight"] = [layer.out_features, rank]
    return expected


def _base_label(name: str) -> str:
    """The part of a model's name that survives moving its folder; for a snapshot in the hub's cache, the name on the hub."""
    snapshot = re.search(r"models--([^/\\]+)", name)
    return (snapshot[1].split("--") if snapshot else re.split(r"[/\\]", name.rstrip("/\\")))[-1].lower()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + " ..."
