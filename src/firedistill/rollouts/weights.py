"""Hands the student's current weights to an engine in another process: as an adapter, or as merged projections.

Every version has a name that is a hash of its contents, so that equal weights are handed over once and no cache that is keyed by names
or paths can serve another version's keys and values.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import cast

import psutil
import torch
from peft import LoraConfig, PeftModel
from peft.tuners import lora
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from firedistill.models.lora import adapter_state
from firedistill.models.states import unwrap
from firedistill.rollouts.merging import mergeable_layers, merged_weight
from firedistill.rollouts.padding import HeadPadding

SHARED_MEMORY = Path("/dev/shm")


class AdapterError(ValueError):
    """An adapter that the engine cannot run; the message says what to change."""


def check_adapter(model: PeftModel, sharded: bool = False) -> None:
    """Raise AdapterError unless the model has one plain LoRA adapter over unquantized linear layers and trains nothing else.

    Args:
        sharded: whether the layers may be spread over processes; the adapter is whole in each of them.
    """
    (name,) = model.active_adapters
    config = model.peft_config[name]
    wrong = [
        what
        for what, found in {
            "DoRA": getattr(config, "use_dora", False),
            "a bias": getattr(config, "bias", "none") != "none" or getattr(config, "lora_bias", False),
            "modules_to_save": bool(getattr(config, "modules_to_save", None)),
            "a type other than LoRA": config.peft_type != "LORA",
        }.items()
        if found
    ]
    mergeable = {id(layer) for _, _, layer in mergeable_layers(model)}
    others = [module for module in model.modules() if isinstance(module, lora.LoraLayer) and id(module) not in mergeable]
    spread = [m for m in others if type(m) is lora.Linear and isinstance(m.base_layer.weight, DTensor)]
    if len(others) > len(spread):
        wrong.append("layers that are quantized or not linear")
    elif spread and not sharded:
        raise AdapterError(
            "every process of --rollouts vllm holds a whole base model, which fsdp_size spreads because it does not fit: use servers "
            "(--rollouts http://host:port) or --rollouts hf"
        )
    base = unwrap(model)
    if isinstance(base.get_output_embeddings(), lora.LoraLayer) and base.config.get_text_config().tie_word_embeddings:
        wrong.append("factors of an output projection that is tied to the embeddings")
    if wrong:
        raise AdapterError(
            f"rollouts by vLLM support plain LoRA on unquantized linear layers, this adapter has {', '.join(wrong)}; use --rollouts hf"
        )


def version_of(model: PeftModel) -> str:
    """A hash of the adapter's weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(adapter_state(model).items()):
        total.update(name.encode() + bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return total.hexdigest()[:24]


def write_adapter(model: PeftModel, folder: Path, padding: HeadPadding | None = None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, for a base model with such heads.

    vLLM reads neither `rank_pattern` nor `alpha_pattern`: with them, every factor B is written times the scaling of its layer.
    """
    folder.mkdir(parents=True)
    (name,) = model.active_adapters
    state = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in adapter_state(model).items()}
    config = cast(LoraConfig, copy.copy(model.peft_config[name]))
    config.inference_mode = True
    if config.rank_pattern or config.alpha_pattern:
        for layer_name, layer in model.named_modules():
            if isinstance(layer, lora.LoraLayer):
                state[f"{layer_name}.lora_B.weight"] *= layer.scaling[name]
        config.r = config.lora_alpha = largest_rank(config)
        config.use_rslora, config.rank_pattern, config.alpha_pattern = False, {}, {}
    save_file(padding.tensors(state) if padding else state, folder / "adapter_model.safetensors")
    config.save_pretrained(str(folder))


def largest_rank(config: LoraConfig) -> int:
    """The largest rank of a layer, which vLLM's `max_lora_rank` bounds."""
    return max([config.r, *(config.rank_pattern or {}).values()])


@torch.no_grad()
def write_merged(model: PeftModel, folder: Path, padding: HeadPadding | None = None) -> None:
    """Write `W + s B A` of every adapted projection, by its name in the base checkpoint and in its dtype.

    The plain projections beside an adapted one are written, too. vLLM joins some of them to one tensor, such as q, k and v, and would
    reload only a part of it.
    """
    names = {id(module): name for name, module in unwrap(model).named_modules()}
    layers = mergeable_layers(model)
    beside = [child for parent, _, _ in layers for child in parent.children() if type(child) is nn.Linear]
    merged = {f"{names[id(layer)]}.weight": merged_weight(layer).cpu().contiguous() for _, _, layer in layers}
    merged |= {f"{names[id(layer)]}.weight": layer.weight.cpu().contiguous() for layer in beside}
    folder.mkdir(parents=True)
    save_file(padding.tensors(merged) if padding else merged, folder / "model.safetensors")


def base_checkpoint(model: PeftModel, scratch: Path, padding: HeadPadding | None = None) -> str:
    """A checkpoint of the base model: the one that it was loaded from, or else a copy in `scratch`."""
    base = unwrap(model)
    if padding is None and hasattr(base, "firedistill_revision"):  # loaded by `load_model_and_tokenizer`, and frozen since
        return str(base.name_or_path)
    folder = scratch / "base"
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in base.state_dict().items() if ".lora_" not in name}
    if padding is None:
        base.save_pretrained(folder, state_dict=state)
    else:
        padding.write(base.config, state, folder)
    return str(folder)


def scratch_folder(size: int) -> Path:
    """A new temporary folder, in memory where the system has such a place. Removes those of processes that were killed.

    Containers and hosts may share the place. Folders of processes that this one cannot see are left alone.

    Args:
        size: bytes that it will hold, as those of the other processes of this host will. In containers, the place in memory often
            has 64 MB.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size * processes
    place = SHARED_MEMORY if in_memory else Path(tempfile.gettempdir())
    prefix = f"firedistill-rollouts-{socket.gethostname()}-{pid_namespace()}-"
    for folder in place.glob(f"{prefix}*-*"):
        with suppress(OSError, ValueError):
            pid = int(folder.name.removeprefix(prefix).split("-")[0])
            if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(pid):
                shutil.rmtree(folder, ignore_errors=True)  # another process may be removing it, too
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place))


def pid_namespace() -> int:
    """Names the processes among which a process id is unique on this host; 0 where the system does not divide them."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
