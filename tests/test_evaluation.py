"""Sampled evaluation, further tasks and other splits: by hand, by enumeration, and through a run."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
import torch

from firedistill import evaluation
from firedistill.cli import main as cli
from firedistill.evaluation import entropy_sums, pass_at_k, summarize, summarize_samples
from firedistill.report.log import NAMED
from firedistill.rollout import Response, Rollout
from firedistill.rollouts.fixed import Decoder
from firedistill.rollouts.hf import HFRolloutEngine
from firedistill.run.log import read_jsonl
from firedistill.tasks import Example, Verdict
from tiny import ToyTask, adapter_weights, random_model, run_config, run_trainer

SAMPLED = {
    "sampled_accuracy",
    "sampled_stderr",
    "pass_at_2",
    "pass_at_3",
    "distinct_answers",
    "sampled_length",
    "sampled_truncated_rate",
    "sampled_entropy",
    "eval_samples",
}


@pytest.mark.parametrize("n", [1, 4, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(n):
    for correct in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * correct + [False] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def sampled(uid, answers, lengths):
    return [
        Rollout(
            Example(uid, "?", "1"),
            [1],
            Response(list(range(length)), "", finished=length < 4),
            Verdict(answer == "1", answer, "1"),
        )
        for answer, length in zip(answers, lengths, strict=True)
    ]


def test_the_summary_of_samples_by_hand():
    # Two problems, whose uids may be equal.
    rollouts = sampled("a", ["1", "1", "2", None], [1, 2, 3, 4]) + sampled("a", ["3", "4", "5", "6"], [2, 2, 2, 4])
    found = summarize_samples(rollouts, 4)
    assert found == pytest.approx(
        {
            "sampled_accuracy": 0.25,
            "sampled_stderr": 0.25,  # deviation of 0.5 and 0 over sqrt(2)
            "pass_at_2": (1 - 1 / 6) / 2,
            "pass_at_4": 0.5,
            "distinct_answers": 3.0,
            "sampled_length": 2.5,
            "sampled_truncated_rate": 0.25,
            "eval_samples": 4,
        }
    )
    assert {name for name in summarize_samples(rollouts[:3], 3) if name.startswith("pass")} == {"pass_at_2", "pass_at_3"}
    assert math.isnan(summarize_samples([], 2)["sampled_accuracy"])
    failed = [replace(rollout, verdict=replace(rollout.verdict, failed=True)) for rollout in rollouts[:3]]
    assert summarize_samples(failed + rollouts[3:], 4)["sampled_failed_verdicts"] == 3


def test_what_is_left_out_of_a_further_task_is_counted_in_columns_that_are_no_charts(monkeypatch):
    found = [{"accuracy": 0.5, "stderr": 0.1, "n": 4}, {"accuracy": 0.25, "stderr": 0.2, "n": 3}]
    found[1] |= {"skipped_over_budget": 1, "failed_verdicts": 2}
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: ([], found.pop(0)))
    args, also = SimpleNamespace(eval_samples=0), {"hard": (ToyTask(), [])}
    summary = evaluation.evaluate_all(object(), ToyTask(), None, [], also, args, None, print).summary
    of_hard = {"also_hard": 0.25, "also_hard_stderr": 0.2}
    assert summary == {"accuracy": 0.5, "stderr": 0.1, "n": 4, **of_hard, "skipped_also_hard": 1, "failed_also_hard": 2}
    assert {name for name in summary if name.startswith(NAMED)} == of_hard.keys()


def test_the_entropy_is_that_of_the_models_own_distributions():
    model = random_model(seed=2)
    rollouts = [
        Rollout(Example(f"x/{n}", "?", "1"), [5, 6, 7], Response([8, 9, 10, 11][:n], "", True), Verdict(False, None, "1"))
        for n in (4, 1, 3)
    ]
    total = 0.0
    for rollout in rollouts:
        logits = model(torch.tensor([rollout.prompt_ids + rollout.response_ids])).logits[0, 2:-1].double().detach()
        p = logits.softmax(-1)
        total -= float((p * p.log()).sum())
    found, tokens = entropy_sums(model, rollouts, max_tokens=8)
    assert tokens == 8 and found == pytest.approx(total, rel=1e-5)


def test_samples_and_further_tasks_are_columns_and_change_nothing(checkpoint, tmp_path):
    trainers = {}
    for name, changes in {"plain": {}, "more": {"eval_samples": 3, "eval_also": ["arithmetic:easy"]}}.items():
        trainers[name] = run_trainer(checkpoint, tmp_path / name, save_strategy="no", **changes)
        trainers[name].train()
    weights = adapter_weights(trainers["more"])
    assert all(torch.equal(value, weights[name]) for name, value in adapter_weights(trainers["plain"]).items())
    plain, more = (read_jsonl(tmp_path / name / "evals.jsonl") for name in trainers)
    times = {"cumulative_train_seconds"}
    for row, other in zip(plain, more, strict=True):
        added = {name for name in other if name not in row}
        assert added == SAMPLED | {"also_arithmetic:easy", "also_arithmetic:easy_stderr"}
        assert {n: v for n, v in row.items() if n not in times} == {n: other[n] for n in row if n not in times}
        assert other["pass_at_3"] >= other["pass_at_2"] >= other["sampled_accuracy"] and other["sampled_entropy"] > 0
        table = pq.read_table(tmp_path / "more" / "rollouts" / f"sampled_{row['step']:06d}.parquet").to_pylist()
        assert len(table) == 3 * row["n"]
        assert sum(r["correct"] for r in table) / len(table) == pytest.approx(other["sampled_accuracy"])
    loss = [[row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")] for name in trainers]
    assert loss[0] == loss[1]


def test_answers_are_greedy_and_samples_have_the_settings_of_the_run(checkpoint, tmp_path):
    """With the same random numbers in every evaluation."""
    trainer = run_trainer(checkpoint, tmp_path / "run", eval_size=2, eval_samples=3, temperature=0.7, top_p=0.9, seed=4)
    asked, generate = [], trainer.eval_engine.generate

    def watched(prompts, sampling, seed, *more):
        asked.append((len(prompts), sampling, seed))
        return generate(prompts, sampling, seed, *more)

    with patch.object(trainer.eval_engine, "generate", watched):
        for _ in range(2):
            trainer.evaluate()
    assert asked[:2] == asked[2:]
    (few, greedy, _), (many, sampling, seed) = asked[:2]
    assert (few, greedy.temperature, many, seed) == (2, 0.0, 6, 4) and (sampling.temperature, sampling.top_p) == (0.7, 0.9)


def test_other_problems_leave_the_run_as_it_is(checkpoint, tmp_path):
    trainer = run_trainer(checkpoint, tmp_path / "run", max_steps=1, eval_samples=2, eval_also=["arithmetic:easy"])
    trainer.train()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    trainer.evaluation_due = True
    found = trainer.evaluate([{"question": "Why?", "answer": "even"}], metric_key_prefix="test")
    assert found["test_n"] == 1 and "test_also_arithmetic:easy" not in found and trainer.evaluation_due
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    with pytest.raises(ValueError, match="eval_dataset/0 has the columns query, which example of toy does not read"):
        trainer.evaluate([{"query": "Why?"}])
    with pytest.raises(ValueError, match=r"predict is for batches with labels: use evaluate\(examples\)"):
        trainer.predict(trainer.eval_examples)


def test_training_does_not_hold_the_keys_and_values_of_an_evaluation(checkpoint, tmp_path):
    """Greedy answers, samples and further tasks use the same ones."""
    trainer = run_trainer(checkpoint, tmp_path / "run", eval_size=5, eval_samples=2, eval_also=["tiny:ToyTask"])
    engine = HFRolloutEngine(trainer.model, trainer.setup.tokenizer, trainer.limits["rollouts"], fixed=True)
    trainer.eval_engine, rows, reserve = engine.sharing(trainer.limits["evaluation"]), [], Decoder.reserve

    def reserved(self, like, count, *sizes):
        rows.append(self.rows)
        reserve(self, like, count, *sizes)

    with patch.object(Decoder, "reserve", reserved):
        trainer.evaluate()
    assert rows[0] == 0 and set(rows[1:]) <= {8, 16} and engine.decoder.rows == 0 and not engine.decoder.layers


def test_the_eval_command_shows_them(checkpoint, tmp_path, capsys):
    config = run_config(checkpoint, tmp_path / "run", task="arithmetic:easy", eval_size=3)
    config.save_yaml(tmp_path / "recipe.yaml")
    arguments = ["eval", str(tmp_path / "recipe.yaml"), "--eval_samples", "2", "--eval_also", "arithmetic:hard"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "pass_at_2: " in out and "sampled_entropy: " in out and "also_arithmetic:hard: " in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--eval_split", "train"], "eval_split is 'train', which arithmetic is trained on"),
        (["--eval_split", "tset"], "has no split 'tset'"),
        (["--eval_split", "tset"], "eval_split is 'tset': arithmetic has no split 'tset'"),
        (["--eval_also", "arithmetik"], "unknown task 'arithmetik'"),
    ],
)
def test_splits_and_tasks_that_do_not_exist_are_refused(options, complaint, checkpoint, tmp_path, capsys):
    run_config(checkpoint, tmp_path / "run", task="arithmetic").save_yaml(tmp_path / "recipe.yaml")
    assert cli.main(["eval", str(tmp_path / "recipe.yaml"), *options]) == 2
    error = capsys.readouterr().err
    assert complaint in error and "Traceback" not in error


def test_the_test_split_of_a_task_with_three(checkpoint, tmp_path):
    row = '{{"question": "Which?", "choices": {{"text": ["{0}", "other"], "label": ["A", "B"]}}, "answerKey": "A"}}\n'
    for split in ("train", "validation", "test"):
        (tmp_path / "ai2_arc").mkdir(exist_ok=True)
        (tmp_path / "ai2_arc" / f"{split}.jsonl").write_text("".join(row.format(f"{split} {i}") for i in range(3)))
    settings = {"task": "arc_challenge", "data_dir": str(tmp_path), "eval_size": 2}
    from firedistill.setup import load_setup

    for split, published in (("eval", "validation"), ("test", "test")):
        setup = load_setup(run_config(checkpoint, tmp_path / "run", **settings, eval_split=split), train=False)
        assert {example.uid.split("/")[1] for example in setup.eval_examples} == {published}
    with pytest.raises(ValueError, match="is trained on"):
        load_setup(run_config(checkpoint, tmp_path / "run", **settings, eval_split="train"), train=False)


def test_categories_that_differ_by_a_space_have_columns_of_their_own():
    response = Response("", [1], True)
    rollouts = [
        Rollout(Example(f"u{i}", "q", "a", category=category), [0], response, Verdict(right, "a", "a"))
        for i, (category, right) in enumerate([("a b", True), ("a_b", False), ("c d", True)])
    ]
    found = summarize(rollouts)
    assert (found["accuracy_a b"], found["accuracy_a_b"], found["accuracy_c_d"]) == (1.0, 0.0, 1.0)
