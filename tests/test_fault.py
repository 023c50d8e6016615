"""File operations that fail once, in commands of every kind; `fault_test.py` tries all of them."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "kind, error, every",
    [
        ("train", "ENOSPC", 24),
        ("train", "short", 24),
        ("resume", "EIO", 60),
        ("overwrite", "EACCES", 60),
        ("suite", "ENOSPC", 40),
        ("inspect", "EIO", 30),
        ("report", "ENOSPC", 30),
    ],
)
def test_a_command_survives_a_failing_file_operation_or_ends_with_one_line(kind, error, every):
    """In a process of its own: the library must be loaded when the server starts from which the commands fork."""
    script = Path(__file__).with_name("fault_test.py")
    command = [sys.executable, str(script), "--kind", kind, "--errno", error, "--places", "--every", str(every)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr
