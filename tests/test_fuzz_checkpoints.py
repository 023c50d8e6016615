"""Whatever happens to the files of a checkpoint or an adapter: they are refused in words, or what was loaded is what they hold.

    FIREDISTILL_FUZZ=100000 python -m pytest tests/test_fuzz_checkpoints.py   # longer, outside of continuous integration

Case `n` is drawn from the seed `n`. A failure lists the seeds by what was raised and where.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import re
import signal
import struct
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from firedistill import SelfDistillTrainer
from firedistill.models.lora import add_lora, load_adapter
from firedistill.run.checkpoints import MANIFEST, check, load_state, newest_checkpoint, seal
from firedistill.run.resume import load_adapter_weights
from firedistill.teacher.ema import EMAWeights
from killable import train
from tiny import save_checkpoint

TRIES = int(os.environ.get("FIREDISTILL_FUZZ", 300))
PATIENCE = 20
"""Seconds after which reading a few kilobytes counts as a hang."""

EVIL = "firedistill_evil"
"""A module that can be imported in these tests, and must not be."""

ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *(
        "",
        "a",
        EVIL,
        "q_proj",
        ".*",
        "(",
        "pissa",
        "olora",
        "loftq",
        "eva",
        "all",
        "../x",
        "/etc/passwd",
        "\ud800",
        "x" * 5000,
        "F32",
        "I64",
    ),
    *(
        [],
        [[]],
        [1],
        ["q_proj"],
        [None],
        {},
        {"a": {}},
        {"tensor": "0"},
        {"tensor": []},
        {"dict": [[[], 1]]},
        {"tuple": 3},
        {"dict": 1},
    ),
]
ODD_KEYS = [
    *(
        "",
        "a",
        "files",
        "step",
        "settings",
        "given",
        "__metadata__",
        "dtype",
        "shape",
        "data_offsets",
        "tensor",
        "dict",
        "tuple",
    ),
    *(
        "megatron_config",
        "megatron_core",
        "auto_mapping",
        "modules_to_save",
        "target_modules",
        "target_parameters",
        "exclude_modules",
    ),
    *(
        "layer_replication",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "use_dora",
        "use_rslora",
        "lora_bias",
        "bias",
        "r",
    ),
    *(
        "trainable_token_indices",
        "layers_pattern",
        "layers_to_transform",
        "eva_config",
        "loftq_config",
        "peft_type",
        "task_type",
    ),
    *("base_model.model.lm_head.weight", "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"),
    *(
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
    ),
]


# ---- Damage ------------------------------------------------------------------------------------------------------------------


def damaged_value(draw: random.Random, value: Any) -> Any:
    """A JSON value with one change somewhere."""
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        changed = copy.copy(value)
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw.choice(keys)
        kind = draw.random()
        if kind < 0.6:
            changed[key] = damaged_value(draw, value[key])
        elif kind < 0.75:
            del changed[key]
        elif kind < 0.85:
            changed[key] = value[draw.choice(keys)]
        elif isinstance(value, list):
            changed.insert(key, draw.choice(ODD_VALUES))
        elif kind < 0.93:
            changed[draw.choice(ODD_KEYS)] = changed.pop(key)
        else:
            changed[draw.choice(ODD_KEYS)] = draw.choice(ODD_VALUES)
        return changed
    if isinstance(value, int | float) and draw.random() < 0.4:
        return value + draw.choice([1, -1, 0.5, 10**6])
    return [value] if draw.random() < 0.1 else draw.choice(ODD_VALUES)


def damaged_json(draw: random.Random, data: bytes) -> bytes:
    text = json.dumps(damaged_value(draw, json.loads(data)))
    if draw.random() < 0.03:
        text = "[" * 100_000 + text
    return text.encode("utf-8", "surrogatepass")


def damaged_tensors(draw: random.Random, data: bytes) -> bytes:
    """A safetensors file with a change in its header, which has the right length or not."""
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length]
    if draw.random() < 0.2:
        header = header.replace(b'"F32"', draw.choice([b'"I32"', b'"U32"']), draw.choice([1, -1])).replace(
            b'"I64"', b'"F64"', 1
        )
    else:
        header = damaged_json(draw, header)
    said = (
        len(header) if draw.random() < 0.9 else draw.choice([0, 1, len(header) - 1, len(header) + 1, 2**32, 2**63, 2**64 - 1])
    )
    return struct.pack("<Q", said) + header + data[8 + length :]


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    start, size = draw.randrange(len(data) + 1), draw.randint(1, 64)
    kind = draw.randrange(6)
    if kind == 0:
        changed = bytearray(data)
        for _ in range(draw.randint(1, 8) if data else 0):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    return [
        data[:start],
        data[:start] + bytes(size) + data[start + size :],
        data[:start] + data[start + size :],
        data[:start] + draw.randbytes(size) + data[start:],
        b"",
    ][kind - 1]


def damage_file(draw: random.Random, path: Path, others: list[Path]) -> None:
    """Change a file, remove it, or put one of `others`, a link or a folder in its place."""
    data, kind = path.read_bytes(), draw.random()
    if kind < 0.55 and path.suffix == ".json" and data:
        path.write_bytes(damaged_json(draw, data))
    elif kind < 0.55 and path.suffix == ".safetensors":
        path.write_bytes(damaged_tensors(draw, data))
    elif kind < 0.85:
        path.write_bytes(damaged_bytes(draw, data))
    elif kind < 0.92:
        other = draw.choice(others)
        path.write_bytes(other.read_bytes() if other.exists() else b"")
    else:
        path.unlink()
        if kind > 0.98:
            path.mkdir()
        elif kind > 0.96:
            path.symlink_to(draw.choice([*others, "/nowhere"]))


class Files:
    """Folders whose files are damaged and put back."""

    def __init__(self, *folders: Path):
        self.folders = folders
        self.whole = {path: path.read_bytes() for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()}

    @contextmanager
    def damaged(self, draw: random.Random, among: Callable[[Path], bool] = lambda path: True) -> Iterator[None]:
        paths = [path for path in self.whole if among(path)]
        chosen = draw.sample(paths, min(len(paths), draw.choice([1, 1, 1, 2, 3])))
        extra = chosen[0].parent / draw.choice(["scheduler.pt", "adapter_model.bin", "extra.json"])
        try:
            for path in chosen:
                damage_file(draw, path, [other for other in paths if other not in chosen] or [extra.parent / MANIFEST])
            if draw.random() < 0.05:
                extra.write_bytes(b"\x80\x04.")
            yield
        finally:
            extra.unlink(missing_ok=True)
            for path in chosen:
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            for path in {*chosen, *(path.parent / MANIFEST for path in chosen)} & self.whole.keys():
                path.write_bytes(self.whole[path])

    def are_whole(self, folder: Path) -> bool:
        return all(
            path.is_file() and path.read_bytes() == data for path, data in self.whole.items() if path.is_relative_to(folder)
        )


def signature(error: BaseException) -> str:
    """What was raised, and the last lines that led to it."""
    frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)][-4:]
    text = str(error).partition("\n")[0] if isinstance(error, AssertionError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:150]} at {' > '.join(frames)}"


def is_in_words(error: Exception) -> bool:
    """Whether firedistill itself has raised it, with a message for the user."""
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError | FileNotFoundError) and "/firedistill/" in place and bool(str(error))


def try_them_all(case: Callable[[random.Random], None]) -> None:
    """Cases 0, 1, 2, ...: each returns or refuses its files in words."""

    def hang(number, frame):
        raise TimeoutError("hangs")

    found, before = defaultdict(list), signal.signal(signal.SIGALRM, hang)
    try:
        for seed in range(TRIES):
            signal.alarm(PATIENCE)
            try:
                case(random.Random(seed))
            except Exception as error:
                if not is_in_words(error):
                    found[re.sub(r"\d{3,}", "N", signature(error))].append(seed)
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    most = sorted(found.items(), key=lambda entry: -len(entry[1]))
    assert not found, "\n".join(f"{len(seeds)}x {what}; seeds {seeds[:5]}" for what, seeds in most)


# ---- Checkpoints -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> SelfDistillTrainer:
    """After a run of TrOPD, which has a state of its own, of two steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("fuzz")
    model = save_checkpoint(folder / "base")
    trained = train(model, folder / "run", "tropd", 2, save_steps=1, eval_size=0, lora_target_modules=["q_proj"], lora_r=2)
    assert trained.checkpoint_to_resume("auto").name == "checkpoint-2"
    return trained


@pytest.fixture(scope="module")
def files(trainer) -> Files:
    run = Path(trainer.args.output_dir)
    return Files(run / "checkpoint-1", run / "checkpoint-2")


def newest(files: Files) -> Path:
    return files.folders[-1]


def structure(state: Any, path: str = "") -> dict[str, Any]:
    """The types of a state's values, dtypes and shapes of its tensors, by their path in it; integers and floats are alike."""
    if isinstance(state, torch.Tensor):
        return {path: (state.dtype, tuple(state.shape))}
    if isinstance(state, dict):
        return {path: dict} | {
            name: kind for key, value in state.items() for name, kind in structure(value, f"{path}/{key!r}").items()
        }
    if isinstance(state, list | tuple):
        parts = [structure(value, f"{path}/{position}") for position, value in enumerate(state)]
        return {path: type(state)} | {name: kind for part in parts for name, kind in part.items()}
    return {path: "number" if type(state) in (int, float) else type(state)}


def test_a_damaged_checkpoint_is_not_used(trainer, files):
    """Where the manifest is whole, the files are those that were written."""

    def case(draw):
        with files.damaged(draw):
            folder = newest_checkpoint(trainer.args.output_dir)
            if folder is not None and (folder / MANIFEST).read_bytes() == files.whole[folder / MANIFEST]:
                assert files.are_whole(folder)

    try_them_all(case)


def test_a_checkpoint_to_resume_is_refused_in_words(trainer, files):
    """Also with a manifest that fits the damaged files."""

    def case(draw):
        with files.damaged(draw, lambda path: path.parent == newest(files)):
            with suppress(OSError, ValueError, AttributeError, RecursionError):
                if draw.random() < 0.3:
                    manifest = json.loads((newest(files) / MANIFEST).read_text())
                    seal(newest(files), {key: value for key, value in manifest.items() if key != "files"})
            folder = trainer.checkpoint_to_resume(draw.choice([None, True, "auto", newest(files)]))
            check(folder)

    try_them_all(case)


def test_adapter_weights_are_loaded_as_they_are_or_refused(trainer, files):
    whole = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}

    def case(draw):
        with files.damaged(draw, lambda path: path == newest(files) / "adapter_model.safetensors"):
            load_adapter_weights(trainer.model, newest(files))
            stored = load_file(newest(files) / "adapter_model.safetensors")
            loaded = get_peft_model_state_dict(trainer.model, save_embedding_layers=False)
            assert_same_tensors(stored, loaded)

    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    try_them_all(case)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, base[name]) if name in base else parameter.shape == whole[name].shape


def test_the_teacher_is_loaded_as_it_is_or_refused(trainer, files):
    weights = EMAWeights(trainer.model, 0.1)

    def case(draw):
        with files.damaged(draw, lambda path: path == newest(files) / "teacher.safetensors"):
            weights.load(newest(files))
            assert_same_tensors(load_file(newest(files) / "teacher.safetensors"), weights.shadow)

    try_them_all(case)


def assert_same_tensors(stored: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    assert stored.keys() == loaded.keys(), "names"
    for name, tensor in stored.items():
        assert tensor.dtype == loaded[name].dtype, "dtypes"
        assert tensor.shape == loaded[name].shape, "shapes"
        assert tensor.numpy().tobytes() == loaded[name].detach().numpy().tobytes(), "values"


def test_stored_states_are_read_or_refused(files):
    """States of any structure; who asked for one checks what it needs."""
    names = ["optimizer", "scheduler", "random_state", "method"]

    def case(draw):
        name = draw.choice(names)
        with files.damaged(draw, lambda path: path.parent == newest(files) and path.stem == name):
            load_state(newest(files), name)

    try_them_all(case)


def test_a_checkpoint_is_restored_with_its_structure_or_refused(trainer, files):
    """Optimizer, schedule, random state, teacher, counters and the method's state, as in a resumed run."""
    names = ["optimizer", "scheduler", "random_state", "method", "teacher", "firedistill_counters"]
    folder = newest(files)

    def states() -> Any:
        optimizer, schedule = trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()
        return structure(
            {"optimizer": optimizer, "schedule": schedule, "method": trainer.objective.state(), "counts": trainer.counters}
        )

    def load() -> None:
        trainer._load_optimizer_and_scheduler(str(folder))
        trainer._load_from_checkpoint(str(folder))
        trainer.take_random_state()

    load()
    expected, schedule = states(), dict(vars(trainer.lr_scheduler))

    def case(draw):
        try:
            with files.damaged(draw, lambda path: path.parent == folder and path.stem in names):
                load()
                found = states()
                wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
                assert not wrong, f"another structure: {wrong[0]} is {found.get(wrong[0])}, not {expected.get(wrong[0])}"
        finally:
            vars(trainer.lr_scheduler).clear()
            vars(trainer.lr_scheduler).update(schedule)
            load()

    try_them_all(case)


# ---- Adapters ----------------------------------------------------------------------------------------------------------------


def small_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


def test_an_adapter_is_loaded_as_it_is_or_refused(tmp_path, monkeypatch):
    """Neither it nor its configuration changes base weights, loads code, or leaves factors out."""
    (tmp_path / f"{EVIL}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    base = small_model()
    adapted = add_lora(copy.deepcopy(base), r=2, alpha=4, target_modules=["q_proj", "v_proj"])
    names = {name for name, p in adapted.named_parameters() if p.requires_grad}
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").unlink()
    files = Files(tmp_path / "adapter")
    given = {f"base_model.model.{name}": p for name, p in base.named_parameters()}

    def case(draw):
        model = copy.deepcopy(base)
        with files.damaged(draw):
            before = [(name, id(p)) for name, p in model.named_parameters()]
            try:
                loaded = load_adapter(model, tmp_path / "adapter")
            except ValueError:
                assert before == [(name, id(p)) for name, p in model.named_parameters()], "refused, but the model has changed"
                raise
            finally:
                assert EVIL not in sys.modules, "loads code"
            stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
            assert all(tensor.is_floating_point() for tensor in stored.values()), "dtypes"
            assert_same_tensors(
                {name: tensor.float() for name, tensor in stored.items()},
                get_peft_model_state_dict(loaded, save_embedding_layers=False),
            )
            trainable = {name for name, p in loaded.named_parameters() if p.requires_grad}
            assert trainable <= names and all(".lora_" in name for name in trainable), "trains something else"
            for name, parameter in loaded.named_parameters():
                if name not in trainable:
                    assert torch.equal(parameter, given[name.replace(".base_layer", "")]), "base weights"

    try_them_all(case)
