"""A few random kills of every kind of run; `kill_test.py` does many."""

from __future__ import annotations

import os

import pytest

from attempts import KINDS
from kill_test import campaign

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")]


def test_runs_survive_kills_and_equal_the_untouched_ones():
    kinds = ["fire", "command", "warmstart", "overwrite", "suite", "ranks"]
    outcomes = campaign(kinds, kills=3, steps=3, seed=1)
    assert [(outcome.kind, outcome.differences) for outcome in outcomes] == [(kind, []) for kind in kinds]
    assert all(outcome.kills >= 3 and outcome.runs >= 1 for outcome in outcomes)


def test_a_campaign_has_every_method_and_every_kind_of_run():
    assert len(KINDS) == 16 + 5 and {"fire", "srpo", "warmstart", "command", "overwrite", "suite", "ranks"} <= KINDS.keys()
