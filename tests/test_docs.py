"""The examples of the documentation run as they are printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from firedistill import SelfDistillConfig, SelfDistillTrainer
from firedistill.objectives import load_objective
from firedistill.run_log import read_jsonl
from tiny import ToyTask, save_checkpoint

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "add-a-method.md"


@pytest.fixture
def hopeful(tmp_path, monkeypatch):
    """The page's example as a module."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "hopeful.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hopeful:Hopeful"
    sys.modules.pop("hopeful", None)


def test_the_example_method_trains_whatever_the_micro_batches(hopeful, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "base")
    weights = []
    for size, accumulation in ((4, 1), (1, 4)):
        config = SelfDistillConfig(
            model=checkpoint,
            task="toy",
            method=hopeful,
            method_settings={"group_size": 3, "power": "2"},
            model_dtype="float32",
            output_dir=str(tmp_path / f"run{size}"),
            max_steps=3,
            warmup_steps=1,
            learning_rate=1e-2,
            max_new_tokens=6,
            eval_size=0,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=False,
            use_cpu=True,
        )
        trainer = SelfDistillTrainer(args=config, task=ToyTask())
        trainer.train()
        rows = read_jsonl(tmp_path / f"run{size}" / "metrics.jsonl")
        assert all(0 < row["hopeful_success"] < 1 and row["kl"] >= 0 and row["grad_norm"] > 0 for row in rows)
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad})
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)


def test_the_example_method_refuses_what_it_does_not_know(hopeful):
    assert load_objective(hopeful, {"power": 0.5}).power == 0.5
    with pytest.raises(ValueError, match="no setting 'powr'; did you mean 'power'"):
        load_objective(hopeful, {"powr": 2})
    with pytest.raises(ValueError, match="power is -1.0"):
        load_objective(hopeful, {"power": -1})
    with pytest.raises(ValueError, match="group_size is 0"):
        load_objective(hopeful, {"group_size": 0})
    with pytest.raises(ValueError, match="power is 'much'; expected a number"):
        load_objective(hopeful, {"power": "much"})


def test_the_readmes_task_trains_and_fire_attributes_to_its_fields(tmp_path, monkeypatch):
    (source,) = re.findall(
        r"```python\n(from firedistill import Example.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "reverse_words.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = SelfDistillConfig(
        model=save_checkpoint(tmp_path / "base"),
        task="reverse_words:Reverse",
        model_dtype="float32",
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        warmup_steps=1,
        learning_rate=1e-2,
        max_new_tokens=6,
        eval_size=2,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        use_cpu=True,
    )
    SelfDistillTrainer(args=config).train()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2 and all(row["correct_rate"] == 0 and row["grad_norm"] > 0 for row in rows)
    assert {"alpha_full", "alpha_verdict", "alpha_length"} <= rows[0].keys()
    assert [row["n"] for row in read_jsonl(tmp_path / "run" / "evals.jsonl")] == [2] * 2
