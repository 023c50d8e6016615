"""docs/results.md and docs/results-tables.md hold the numbers of docs/studies, and differences are those of a literal bootstrap."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

DOCS = Path(__file__).parents[1] / "docs"
sys.path.append(str(DOCS))

import studies  # noqa: E402


def test_the_tables_of_the_pages_are_those_of_the_runs():
    texts = [page.read_text(encoding="utf-8") for page in studies.PAGES]
    assert sum(text.count("<!-- table ") for text in texts) == len(studies.TABLES)
    assert all(studies.with_tables(text) == text for text in texts)


def test_a_row_agrees_with_its_answers():
    for path in (DOCS / "studies").glob("*.csv"):
        rows = pd.read_csv(path)
        for kind, column in (("greedy", "accuracy"), ("sampled", "sampled_accuracy")):
            if column in rows:
                evaluated = rows[rows[column].notna()]
                found = studies.matrix(evaluated, kind).mean(axis=1).to_numpy() / 100
                assert len(found) and found == pytest.approx(evaluated[column].to_numpy(), abs=1e-5)


def rows_of(answers: dict[int, str]) -> pd.DataFrame:
    return pd.DataFrame({"seed": list(answers), "greedy": ["=" + text for text in answers.values()]})


def test_differences_are_paired_by_seed_and_problem():
    apart = studies.paired(rows_of({0: "1110", 1: "1010", 3: "0000"}), rows_of({1: "1000", 0: "1100", 2: "1111"}), "greedy")
    mean, low, high = studies.interval(apart)
    assert apart.mean(axis=1).to_dict() == {0: 25.0, 1: 25.0} and mean == 25.0
    # Both seeds differ on the third problem only, which a draw of four problems holds 0 to 4 times.
    assert low == 0.0 and high == pytest.approx(75.0)


def test_the_interval_covers_seeds_and_problems():
    draw = np.random.default_rng(1)
    answers = {seed: "".join(map(str, draw.integers(0, 2, 30))) for seed in range(5)}
    reference = {seed: "".join(map(str, draw.integers(0, 2, 30))) for seed in range(5)}
    mean, low, high = studies.interval(studies.paired(rows_of(answers), rows_of(reference), "greedy"))
    apart = 100 * np.array([[int(a) - int(b) for a, b in zip(answers[s], reference[s], strict=True)] for s in range(5)])
    drawn = [apart[draw.integers(0, 5, 5)][:, draw.integers(0, 30, 30)].mean() for _ in range(20_000)]
    assert mean == pytest.approx(apart.mean())
    assert [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=1.5)


def test_the_interval_of_answers_draws_seeds_and_answers():
    draw = np.random.default_rng(1)
    seeds = pd.Series(np.repeat([0, 1, 2], 20))
    # Within a seed, the answers are equal, so that only the draw of three seeds matters.
    found = studies.interval_of_answers(pd.Series(np.repeat([0.1, 0.2, 0.6], 20)), seeds)
    assert found == pytest.approx((0.3, 0.1, 0.6))
    values = draw.random((3, 20))
    mean, low, high = studies.interval_of_answers(pd.Series(values.ravel()), seeds)
    drawn = [np.mean([draw.choice(values[seed], 20).mean() for seed in draw.integers(0, 3, 3)]) for _ in range(10_000)]
    assert mean == pytest.approx(values.mean()) and [low, high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.01)


def test_weights_are_of_the_same_problems_with_right_and_with_wrong_feedback():
    """Problems with larger weights in both runs are no sign of wrong feedback."""
    runs = itertools.product(("answer-0", "answer-0.5", "hint-0", "hint-0.5"), (0, 1), (0, 150), ("a", "b"))
    table = pd.DataFrame(runs, columns=["variant", "seed", "step", "uid"])
    table["wrong"] = (table["variant"].str.endswith("0.5") & (table["uid"] == "b")).astype(int)
    table["weight"] = np.where(table["uid"] == "a", 0.1, 0.4 + table["seed"] / 10)
    lines = studies.noise_weights(table).splitlines()[2:]
    assert lines[1] == "| `verifier` | after | 2 | 0.4500 | 0.4500 | +0.0000 (+0.0000 to +0.0000) |" and len(lines) == 4
