"""What a command prints never decides about it: full disks, closed pipes, closed streams, lost terminals, encodings, ranks."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import threading

import pytest

from firedistill.cli import main as cli
from firedistill.run.log import read_jsonl
from firedistill.terminal import UnfailingStream, Visibly, process_rank, unfailing_output
from test_cli import RECIPE
from test_report import write_run
from tiny import save_checkpoint

PRINTS = """\
import logging, os, sys, time, warnings
from rich.console import Console
from rich.live import Live
from firedistill.terminal import unfailing_output

with unfailing_output(report_pipes={report_pipes}):
    console = Console()
    with Live(console=console, refresh_per_second=50):
        for step in range({lines}):
            console.print(f"step {{step}} 50.0% ± 25.0%")
            time.sleep({pause})
    logging.getLogger("x").warning("a warning")
    warnings.warn("another one")
    print("x" * 100_000)
    fresh = os.open("fresh", os.O_CREAT | os.O_RDWR)
    assert fresh > 2, "a file got the descriptor of a closed stream"
    open("survived", "w").close()
"""


def child(folder, command="{python} prints.py", lines=20, pause=0, report_pipes=True, **options):
    """A process of a shell that prints; `survived` exists if nothing has ended it."""
    (folder / "prints.py").write_text(PRINTS.format(lines=lines, pause=pause, report_pipes=report_pipes))
    shell = command.format(python=f"{sys.executable} -X dev -W ignore::DeprecationWarning")
    return subprocess.run(["bash", "-o", "pipefail", "-c", shell], cwd=folder, timeout=60, **options)


@pytest.mark.parametrize(
    "command",
    [
        "{python} prints.py > /dev/full",
        "{python} prints.py > /dev/full 2>&1",
        "{python} prints.py | head -2",
        "{python} prints.py 2>&1 | head -2",
        "{python} prints.py >&-",
        "{python} prints.py 2>&-",
        "{python} prints.py <&- >&- 2>&-",
        "PYTHONIOENCODING=ascii {python} prints.py",
        "PYTHONUNBUFFERED=1 {python} prints.py | head -2",
    ],
)
def test_no_standard_stream_ends_a_command(command, tmp_path):
    done = child(tmp_path, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # 120: the interpreter could not flush a stream at its end
    assert (tmp_path / "survived").exists() and (tmp_path / "fresh").read_bytes() == b""
    for complaint in ("Traceback", "Exception ignored", "Error:"):
        assert complaint not in done.stderr
    if "ascii" in command:
        assert r"50.0% \xb1 25.0%" in done.stdout
    told = "standard output cannot be written"
    assert done.stderr.count(told) == (not command.endswith(("2>&1", "2>&-", "prints.py", "2>&1 | head -2", ">&-")))


def test_commands_that_only_print_say_nothing_of_a_closed_pipe(tmp_path):
    done = child(tmp_path, "{python} prints.py | head -1", report_pipes=False, capture_output=True, text=True)
    assert done.returncode == 0 and "cannot be written" not in done.stderr and (tmp_path / "survived").exists()


def test_a_terminal_that_goes_away_ends_no_command(tmp_path):
    """Writing to it fails with EIO; a live display is being refreshed at that time."""
    main, terminal = pty.openpty()
    ended = []
    thread = threading.Thread(
        target=lambda: ended.append(
            child(tmp_path, "trap '' HUP; {python} prints.py", pause=0.05, stdin=terminal, stdout=terminal, stderr=terminal)
        )
    )
    thread.start()
    os.read(main, 100)
    os.close(terminal)
    os.close(main)
    thread.join(60)
    assert ended[0].returncode == 0 and (tmp_path / "survived").exists()


class Broken(io.StringIO):
    """A stream on a disk that is full at times."""

    full = True

    def write(self, text):
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_output_continues_when_there_is_room_again(monkeypatch):
    stream, other = Broken(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", other)
    with unfailing_output() as output:
        print("lost")
        print("lost, too")
        stream.full = False
        print("written")
    assert stream.getvalue().strip() == "written" and isinstance(output.failure, OSError)
    assert other.getvalue().count("standard output cannot be written ([Errno 28] No space left on device)") == 1
    assert sys.stdout is stream


def test_a_closed_stream_and_a_broken_other_one(monkeypatch):
    stream = io.StringIO()
    stream.close()
    output, other = UnfailingStream(stream, "standard output"), UnfailingStream(Broken(), "standard error")
    output.other, other.other = other, output
    assert output.write("text") == 4
    output.flush()
    assert isinstance(output.failure, ValueError) and isinstance(other.failure, OSError)


def test_a_run_whose_log_is_on_a_full_disk_is_a_complete_run(tmp_path, monkeypatch):
    (tmp_path / "toy.yaml").write_text(RECIPE.format(model=save_checkpoint(tmp_path / "base"), output=tmp_path / "run"))
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)

    def into_full_disk(*arguments):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            return cli.main([str(argument) for argument in arguments])

    assert into_full_disk("train", tmp_path / "toy.yaml") == 0
    assert into_full_disk("report", tmp_path / "run", "-o", tmp_path / "report") == 0
    assert into_full_disk("train", "--help") == 2, "a command that only prints has failed"
    assert errors.getvalue().count("standard output cannot be written") == 3
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 4 and (tmp_path / "run" / "curves.png").is_file()
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file() and (tmp_path / "report" / "index.html").is_file()


# ---- Several processes -----------------------------------------------------------------------------------------------------


def test_only_the_main_process_prints_and_errors_name_the_rank(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run")
    record = logging.LogRecord("x", logging.WARNING, "", 0, "a warning", None, None)
    for rank, world, shown in (("0", "2", True), ("1", "2", False), ("1", "1", True), ("x", "", True)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        assert process_rank() == (not shown)
        assert cli.main(["report", str(run), "-o", str(tmp_path / "curves.png")]) == 0
        assert ("wrote " in capsys.readouterr().out) == shown
        assert cli.main(["report", str(tmp_path / "none"), "-o", str(tmp_path / "report")]) == 2
        assert capsys.readouterr().err.startswith("firedistill report: " if shown else "[rank 1] firedistill report: ")
        assert Visibly().format(record) == ("" if shown else "[rank 1] ") + "a warning"
