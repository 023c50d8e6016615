"""The sandbox against the programs in tests/hostile, at every level of isolation and for every user that can be had here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from firedistill.tasks import sandbox
from firedistill.tasks.sandbox import Limits, Other, SandboxError, Snippet, matches, run_program
from hostile_run import report_of

HOSTILE = Path(__file__).parent / "hostile"
SECRET = "correct-horse-battery-staple"
QUICK = {"cpu_seconds": 1, "seconds": 1.5, "total_seconds": 3.0}
SYSTEM_PYTHON = "/usr/bin/python3"
# What each program may lead to: statuses of the load, of the test, and what the test may return.
EXPECTED = {
    "closes_files": ({"returned"}, {"returned", "died"}, {"1"}),
    "daemon": ({"returned"}, {"returned"}, {"0"}),
    "endless_output": ({"time"}, {"not run"}, set()),
    "equals_everything": ({"returned"}, {"returned"}, {"1"}),
    "executes": ({"returned"}, {"returned"}, {"[]"}),
    "exit_zero": ({"returned"}, {"died"}, set()),
    "exits": ({"raised"}, {"not run"}, set()),
    "fakes_results": ({"returned"}, {"returned"}, {"True"}),
    "fork_bomb": ({"time"}, {"not run"}, set()),
    "hostile_error": ({"returned"}, {"time"}, set()),
    "huge_files": ({"returned"}, {"returned", "raised", "died"}, None),
    "huge_value": ({"returned"}, {"large", "died", "memory", "time"}, set()),
    "ignores_signals": ({"returned"}, {"time"}, set()),
    "kill_parent": ({"returned"}, {"returned"}, None),
    "long_error": ({"returned"}, {"raised", "memory"}, set()),
    "memory_hog": ({"time", "memory", "died"}, {"not run"}, set()),
    "namespaces_again": ({"returned"}, {"returned"}, {"[]"}),
    "nested_source": ({"raised", "memory", "died"}, {"not run"}, set()),
    "nested_value": ({"returned"}, {"raised", "died"}, set()),
    "patches_harness": ({"raised", "died", "unreadable"}, {"not run"}, set()),
    "pickled_result": ({"returned"}, {"unreadable"}, set()),
    "raises_limits": ({"returned"}, {"returned"}, {"[]", "['CORE']"}),
    "read_secrets": ({"returned"}, {"returned"}, None),
    "shared_memory": ({"returned"}, {"returned"}, {"0"}),
    "signal_by_file": ({"returned"}, {"returned"}, {"[]"}),
    "sleeps": ({"returned"}, {"time"}, set()),
    "sockets": ({"returned"}, {"returned"}, {"[]"}),
    "surrogates": ({"returned"}, {"returned"}, {repr("\ud800")}),
    "threads": ({"time", "memory", "died"}, {"not run"}, set()),
    "traces_parent": ({"returned"}, {"returned"}, {"[]"}),
    "write_outside": ({"returned"}, {"returned"}, {"[]"}),
}


@pytest.fixture(scope="module")
def place():
    """A folder with copies of the sandbox that everyone can read, and one with secrets that only its owner can."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.chmod(0o755)
    for path in (sandbox.STAGE, Path(sandbox.__file__)):
        shutil.copy(path, folder)
    shutil.copy(Path(__file__).with_name("hostile_run.py"), folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    yield folder
    shutil.rmtree(folder)


def other_user(level: str) -> str:
    """Why programs cannot be run as another user here, if so."""
    if os.geteuid() != 0:
        return "needs root to become another user"
    return "" if os.path.exists(SYSTEM_PYTHON) else f"needs {SYSTEM_PYTHON}"


def run(place: Path, who: str, job: dict) -> dict:
    """Run a job as this user, or as the user nobody with the system's Python."""
    job = {"setup": "", "tests": ["solve(1)"], "limits": QUICK, **job}
    if who == "self":
        try:
            return report_of(sandbox, job)
        except SandboxError as error:
            return {"failed": str(error)}
    done = subprocess.run(
        [SYSTEM_PYTHON, "-B", str(place / "hostile_run.py"), str(place)],
        input=json.dumps(job).encode(),
        capture_output=True,
        user=65534,
        group=65534,
        extra_groups=[],
        env={"SECRET_TOKEN": SECRET, "PATH": "/usr/bin"},
        cwd="/",
        timeout=30,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["self-namespaces", "self-filter", "nobody-namespaces", "nobody-filter"])
def cell(request, place):
    """A user and a level that work here, and a folder of that user with a secret."""
    who, level = request.param.split("-")
    if who == "nobody" and (reason := other_user(level)):
        pytest.skip(reason)
    first = run(place, who, {"level": level, "program": "import decimal", "tests": ["1"]})
    if "failed" in first or first["load"] != "returned":
        pytest.skip(f"{level} does not work here for {who}: {first.get('failed') or first['error']}")
    secrets = place / f"secrets-{request.param}"
    secrets.mkdir()
    (secrets / "secret").write_text(SECRET)
    if who == "nobody":
        for path in (secrets, secrets / "secret"):
            os.chown(path, 65534, 65534)
    (secrets / "secret").chmod(0o600)
    secrets.chmod(0o700)
    return who, level, secrets


def stages() -> set[int]:
    """PIDs of the sandbox's processes; all of them have the stage in their command line."""
    found = set()
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else []:
        try:
            if entry.name.isdigit() and b"sandbox_stage.py" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


class Listener:
    """Sockets that nothing should reach."""

    def __init__(self, folder: Path):
        self.tcp, self.udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        self.unix, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.tcp.bind(("127.0.0.1", 0))
        self.udp.bind(("127.0.0.1", 0))
        self.unix.bind(f"{folder}/socket")
        self.abstract.bind(f"\0hostile-{os.getpid()}")
        for stream in (self.tcp, self.unix, self.abstract):
            stream.listen()
        for each in self.all:
            each.setblocking(False)

    @property
    def all(self):
        return (self.tcp, self.udp, self.unix, self.abstract)

    def reached(self) -> list[str]:
        found = []
        for each in self.all:
            with suppress(BlockingIOError):
                each.recv(10) if each is self.udp else each.accept()[0].close()
                found.append(str(each))
        return found


@pytest.fixture
def listener(cell):
    listener = Listener(cell[2])
    yield listener
    for each in listener.all:
        each.close()
    (cell[2] / "socket").unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox isolates programs on Linux only")
@pytest.mark.parametrize("name", sorted(path.stem for path in HOSTILE.glob("*.py")))
def test_hostile_programs_are_contained(cell, place, listener, name, monkeypatch):
    who, level, secrets = cell
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    before, files = stages(), set(Path(tempfile.gettempdir()).glob("firedistill-sandbox-*"))
    program = (HOSTILE / f"{name}.py").read_text()
    if name == "nested_source":
        program = program.replace("0  # NESTED", "(" * 50_000 + ")" * 50_000 + "\n" + "-" * 200_000 + "1")
    setup = {"PARENT": os.getpid(), "SECRET_FOLDER": str(secrets), "TCP_PORT": listener.tcp.getsockname()[1]}
    setup["UDP_PORT"] = listener.udp.getsockname()[1]
    started = time.monotonic()
    report = run(place, who, {"level": level, "program": program, "setup": "\n".join(f"{k} = {v!r}" for k, v in setup.items())})
    assert time.monotonic() - started < 20
    assert "failed" not in report
    loads, tests, values = EXPECTED[name]
    assert report["load"] in loads and report["tests"][0] in tests, report
    if report["tests"][0] == "returned":
        assert values is None or report["value"] in values
    assert not report["passes"]  # a test that expects 42
    assert SECRET not in json.dumps(report)
    assert listener.reached() == []
    assert (secrets / "secret").read_text() == SECRET and not (secrets / "hostile-was-here").exists()
    assert stages() <= before
    assert set(Path(tempfile.gettempdir()).glob("firedistill-sandbox-*")) <= files
    assert len(report["output"]) <= 2 * Limits().output_bytes


def test_every_hostile_program_is_expected_to_end_somehow():
    assert sorted(EXPECTED) == sorted(path.stem for path in HOSTILE.glob("*.py"))
