"""File operations that fail once, in commands of every kind; `fault_test.py` tries all of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD and /proc of Linux"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, for the library that lets operations fail"),
]
# Kind, error and `--every` of a campaign, and the least number of faults, about one less than its places divided by `--every`.
LEAST = {
    "train:ENOSPC:24": 7,
    "train:short:10": 3,
    "resume:EIO:60": 12,
    "overwrite:EACCES:60": 8,
    "suite:ENOSPC:10": 3,
    "inspect:EIO:30": 6,
    "report:ENOSPC:30": 3,
}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> tuple[dict[str, dict], str]:
    """In a process of its own: the library must be loaded when the server starts from which the commands fork."""
    script, results = Path(__file__).with_name("fault_test.py"), tmp_path_factory.mktemp("faults") / "results.jsonl"
    command = [sys.executable, str(script), "--places", "--results", str(results), "--kind", *LEAST]
    results.touch()
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200)
    return {row["kind"]: row for row in map(json.loads, results.read_text().splitlines())}, ended.stdout


@pytest.mark.parametrize("kind", LEAST)
def test_a_command_survives_a_failing_file_operation_or_ends_with_one_line(kind, campaign):
    rows, output = campaign
    assert kind in rows, output
    assert rows[kind]["findings"] == 0 and rows[kind]["tried"] >= LEAST[kind], output
