"""Checkpoint folders: complete, and with weights in safetensors only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from firedistill.files import naming, read_json
from firedistill.models.errors import NO_WEIGHTS, ModelError
from firedistill.models.sharding import local
from firedistill.terminal import some


def check_folder(folder: Path, name: str) -> None:
    """Refuse a folder that is not a complete checkpoint in safetensors, or that makes `from_pretrained` read other weights.

    Raises:
        ModelError: says what the model `name` lacks, or what it is instead.
    """
    has_adapter = (folder / "adapter_config.json").is_file()
    if not (folder / "config.json").is_file():
        if has_adapter:
            raise ModelError(f"{name} holds a LoRA adapter, not a model: give its base model, and this as initial_adapter")
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; pass the GGUF file itself, for instance {ggufs[0]}" if ggufs else ""
        raise ModelError(f"{name} has no config.json, so it is not a Hugging Face checkpoint{hint}")
    if has_adapter:
        raise ModelError(f"{name} holds a model and an adapter (adapter_config.json): move the adapter to a folder of its own")
    config = read_json(folder / "config.json", ModelError)
    if "transformers_weights" in config:
        raise ModelError(
            f"{name}: transformers_weights in config.json names a file with weights; only model.safetensors is read"
        )
    if sharded := next(folder.glob("shard-*-model-*.safetensors"), None):
        raise ModelError(
            f"{name} is a distributed checkpoint ({sharded.name}), which is not read; write it with save_pretrained instead"
        )
    files = weight_files(folder, name)
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ModelError(f"{name} is not complete: it lacks {some(missing, most=1)}; copy or download it again")
    layers, tensors = config.get("num_hidden_layers"), sum(_tensors_in(folder / file) for file in files)
    if isinstance(layers, int) and layers > tensors:  # building a model of any number of layers takes any time
        raise ModelError(f"{name} is not complete: config.json declares {layers} layers, its weights are {tensors} tensors")


def weight_files(folder: Path, name: str) -> list[str]:
    """The names of the files that hold the weights of a checkpoint; the shards need not be there yet.

    Raises:
        ModelError: there are no weights in safetensors, or their index is damaged or names other files.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not index.is_file():
        raise ModelError(NO_WEIGHTS.format(name=name))
    shards = read_json(index, ModelError).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise ModelError(f"{index} is damaged: its weight_map names no files; copy or download it again")
    if refused := sorted({shard for shard in shards.values() if not re.fullmatch(r"[\w.-]+\.safetensors", shard)}):
        raise ModelError(f"{index} names {refused[0]!r}; only weights in safetensors files next to it are read")
    return sorted(set(shards.values()))


def _tensors_in(file: Path) -> int:
    try:
        with naming(file), safe_open(file, framework="pt") as tensors:
            return len(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is damaged or cannot be read: {error}; copy or download it again") from error


def check_weights(model: PreTrainedModel, found: Mapping[str, Any], name: str) -> None:
    """Refuse a model with weights that its files do not hold, or that are not finite.

    Args:
        found: what `from_pretrained` returns with `output_loading_info`. Tied weights count as present.

    Raises:
        ModelError: names the first tensor.
    """
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"{name} is not complete: its files lack {len(missing)} of the model's tensors, for instance {missing[0]}; "
            "copy or download them again"
        )
    if wrong := sorted(found["mismatched_keys"]):
        raise ModelError(
            f"{name} does not fit its config.json: {wrong[0][0]} has shape {list(wrong[0][1])}, not {list(wrong[0][2])}"
        )
    for key, tensor in model.state_dict().items():
        tensor = local(tensor)
        ordered = tensor.is_floating_point() and tensor.element_size() > 1  # PyTorch does not compare 8-bit numbers
        if ordered and tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
            raise ModelError(f"{name} cannot be used: its tensor {key} holds values that are not finite")
