"""The rules of the collapse detector against runs that were judged by eye: precision and recall, printed by `pytest -s`.

The runs are those of the recipe `lab` (150 steps, three evaluations after the first), with the columns that the rules read, rounded to
four digits. A run counts as collapsed if its sampled answers get worse and stay worse, whatever its greedy accuracy does. Each label
has its reason; the shares are of right sampled answers, in blocks of 15 steps.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from firedistill.report.collapse import collapses
from firedistill.report.log import EVALUATIONS, Log

FINE = "rises and stays"
LABELS = {
    "demopsd-1x-seed0": (False, FINE),
    "fire-1x-seed0": (False, FINE),
    "fire-2x-seed0": (False, FINE),
    "full_context-1x-seed0": (False, FINE),
    "hard_gradient_excision-1x-seed0": (False, FINE),
    "no_attribution-1x-seed0": (False, FINE),
    "no_projection-1x-seed0": (False, FINE),
    "on_policy_sft-1x-seed0": (False, FINE),
    "scope-1x-seed0": (False, FINE),
    "srpo-1x-seed0": (False, FINE),
    "veto-1x-seed0": (False, "hardly changes: 47 to 59 %"),
    "full_context-2x-seed0": (True, "92 to 70 %, entropy 0.02 to 0.42"),
    "full_context-2x-seed1": (True, "92 to 82 %, entropy 0.02 to 0.16, half recovered at the end"),
    "full_context-4x-seed0": (True, "92 to 69 %, entropy 0.02 to 0.49"),
    "top_d-1x-seed0": (True, "84 to 0 %, answers run to the limit"),
    "tropd-1x-seed0": (True, "54 to 20 %"),
}
COLLAPSE = ("length collapse", "runaway length", "accuracy drop", "sampling drop")


def rows(columns: dict[str, list]) -> list[dict]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.fixture(scope="module")
def marked() -> dict[str, set[str]]:
    """The rules that mark each run."""
    runs = json.loads(gzip.decompress((Path(__file__).parent / "labelled_runs.json.gz").read_bytes()))
    assert runs.keys() == LABELS.keys()
    return {
        name: {event.rule for event in collapses(Log.of(rows(run["metrics"])), Log.of(rows(run["evaluations"]), EVALUATIONS))}
        for name, run in runs.items()
    }


def precision_and_recall(found: set[str]) -> tuple[float, float]:
    """Precision is NaN where nothing is found."""
    collapsed = {name for name, (label, _) in LABELS.items() if label}
    hits = len(found & collapsed)
    return hits / len(found) if found else math.nan, hits / len(collapsed)


def test_the_rules_find_what_was_judged_to_have_collapsed(marked):
    print()
    for name, (label, reason) in LABELS.items():
        print(f"{name:32} {'collapsed' if label else 'fine':10} {', '.join(sorted(marked[name])) or '-':60} {reason}")
    for rule in (*COLLAPSE, "gradient burst"):
        found = {name for name, rules in marked.items() if rule in rules}
        precision, recall = precision_and_recall(found)
        print(f"{rule:32} precision {precision:.2f}, recall {recall:.2f}")
    found = {name for name, rules in marked.items() if rules & set(COLLAPSE)}
    precision, recall = precision_and_recall(found)
    print(f"{'any rule but the burst':32} precision {precision:.2f}, recall {recall:.2f}")
    assert (precision, recall) == (1.0, 0.8)  # docs/reports.md
