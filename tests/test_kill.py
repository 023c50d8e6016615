"""A few random kills of a run; `kill_test.py` does many."""

from __future__ import annotations

import os

import pytest

from kill_test import kill_again_and_again
from tiny import save_checkpoint


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
@pytest.mark.slow
def test_a_run_survives_kills_and_equals_the_untouched_one(tmp_path):
    model = save_checkpoint(tmp_path / "base")
    outcome = kill_again_and_again(tmp_path, model, "fire", steps=3, kills=4, seed=1)
    assert outcome.differences == () and outcome.kills >= 4 and outcome.runs >= 1
