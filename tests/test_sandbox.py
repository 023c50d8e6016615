"""The sandbox against the programs in tests/hostile, at every level of isolation and for every user that can be had here."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from firedistill.tasks import sandbox, sandbox_stage
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
    "truncates": ({"returned"}, {"returned"}, {"[]"}),
    "traces_parent": ({"returned"}, {"returned"}, {"[]"}),
    "write_outside": ({"returned"}, {"returned"}, {"[]"}),
}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder with copies of the sandbox that everyone can read, and one with secrets that only its owner can."""
    tmp_path_factory.getbasetemp()  # of all tests, so not in the folder below
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.chmod(0o755)
    for path in (sandbox.STAGE, Path(sandbox.__file__)):
        shutil.copy(path, folder)
    shutil.copy(Path(__file__).with_name("hostile_run.py"), folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    (folder / "scratch").mkdir()
    (folder / "scratch").chmod(0o1777)
    with pytest.MonkeyPatch.context() as patch:  # other tests may run programs at the same time
        patch.setattr(sandbox, "STAGE", folder / sandbox.STAGE.name)
        patch.setattr(tempfile, "tempdir", str(folder / "scratch"))
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
        env={"SECRET_TOKEN": SECRET, "PATH": "/usr/bin", "TMPDIR": tempfile.gettempdir()},
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
    """PIDs of the processes of these tests' sandboxes; all of them have the stage in their command line."""
    found = set()
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else []:
        try:
            if entry.name.isdigit() and os.fsencode(sandbox.STAGE) in (entry / "cmdline").read_bytes():
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
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams[0].bind(f"{folder}/datagrams")
        self.datagrams[1].bind(f"\0hostile-datagrams-{os.getpid()}")
        os.chmod(f"{folder}/datagrams", 0o777)
        os.chmod(f"{folder}/socket", 0o777)
        for stream in (self.tcp, self.unix, self.abstract):
            stream.listen()
        for each in self.all:
            each.setblocking(False)

    @property
    def all(self):
        return (self.tcp, self.udp, self.unix, self.abstract, *self.datagrams)

    def reached(self) -> list[str]:
        found = []
        for each in self.all:
            with suppress(BlockingIOError):
                each.recv(10) if each.type == socket.SOCK_DGRAM else each.accept()[0].close()
                found.append(str(each))
        return found


@pytest.fixture
def listener(cell):
    listener = Listener(cell[2])
    yield listener
    for each in listener.all:
        each.close()
    for name in ("socket", "datagrams"):
        (cell[2] / name).unlink()


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
    job = {"level": level, "program": program, "setup": "\n".join(f"{k} = {v!r}" for k, v in setup.items())}
    if name == "long_error":  # takes 0.4 s on a free processor, and must not end by time on a busy one
        job["limits"] = {"cpu_seconds": 5, "seconds": 10.0, "total_seconds": 15.0}
    report = run(place, who, job)
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


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_files_are_not_emptied_before_linux_6_2(cell, place):
    """Landlock does not see truncation by `open` there."""
    who, level, secrets = cell
    if (who, level) != ("nobody", "filter"):
        pytest.skip("the levels and users that depend on Landlock alone")
    old = place / "old-kernel"
    old.mkdir()
    for path in place.glob("*.py"):
        shutil.copy(path, old)
    stage = (old / sandbox.STAGE.name).read_text()
    (old / sandbox.STAGE.name).write_text(stage.replace("    handled = ", "    version = 2\n    handled = "))
    program = (HOSTILE / "truncates.py").read_text()
    report = run(old, who, {"level": level, "program": program, "setup": f"SECRET_FOLDER = {str(secrets)!r}"})
    assert report["value"] == "[]" and (secrets / "secret").read_text() == SECRET


UNSHARE = shutil.which("unshare")
in_own_mounts = pytest.mark.skipif(os.geteuid() != 0 or not UNSHARE, reason="needs root and the command unshare")


def run_after(commands: str, place: Path, job: dict, *options: str, python: str = SYSTEM_PYTHON, **variables: str) -> dict:
    """Run a job after shell commands, in a mount namespace of its own; further options are for `unshare`."""
    job = {"setup": "", "tests": ["solve(1)"], "limits": QUICK, **job}
    done = subprocess.run(
        [UNSHARE, "-m", *options, "sh", "-ec", f'{commands}\nexec {python} -B "$0/hostile_run.py" "$0"', str(place)],
        input=json.dumps(job).encode(),
        capture_output=True,
        env={"PATH": os.environ["PATH"], "TMPDIR": tempfile.gettempdir()} | variables,
        cwd="/",
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@in_own_mounts
def test_mounts_below_a_library_folder_are_read_only(place):
    find = [SYSTEM_PYTHON, "-c", "import email; print(email.__path__[0], end='')"]
    folder = subprocess.run(find, capture_output=True, text=True, check=True).stdout
    commands = f"cd {folder}; mount -t tmpfs -o mode=777 none .; cd {folder}; mkdir 'a b'; mount -t tmpfs -o noexec,mode=777 none 'a b'"
    program = (HOSTILE / "write_outside.py").read_text()
    (place / "link").symlink_to("scratch")
    for name in ("", "/a b"):
        job = {"level": "namespaces", "program": program, "setup": f"SECRET_FOLDER = {folder + name!r}"}
        for scratch in ("scratch", "link"):
            assert run_after(commands, place, job, TMPDIR=str(place / scratch))["value"] == "[]"


@in_own_mounts
@pytest.mark.parametrize("level", ["namespaces", "filter"])
def test_shared_libraries_may_be_in_any_folder(place, level):
    """sqlite3 needs a library that is only in a folder of LD_LIBRARY_PATH, as on clusters."""
    find = (
        "import _sqlite3, subprocess; print(subprocess.run(['ldd', _sqlite3.__file__], capture_output=True, text=True).stdout)"
    )
    found = subprocess.run([SYSTEM_PYTHON, "-c", find], capture_output=True, text=True).stdout
    libraries = [line.split()[2] for line in found.splitlines() if "libsqlite3" in line]
    if not libraries:
        pytest.skip(f"{SYSTEM_PYTHON} has sqlite3 without its library")
    (place / f"real-{level}").mkdir()
    (place / f"links-{level}").symlink_to(f"real-{level}")
    commands = f"cp -L {libraries[0]} {place}/real-{level}; mount --bind /dev/null $(readlink -f {libraries[0]})"
    program = "import sqlite3\ndef solve(x):\n    return sqlite3.connect(':memory:').execute('select 3').fetchall()"
    job = {"level": level, "program": program}
    assert run_after(commands, place, job)["error"][0] == "ImportError"
    assert run_after(commands, place, job, LD_LIBRARY_PATH=f":.:{place}/links-{level}")["value"] == "[(3,)]"


HONEST = """
import asyncio, concurrent.futures, contextlib, os, socket, sqlite3, tempfile, threading
async def seven():
    await asyncio.sleep(0)
    return 7
def solve(x):
    with open(os.devnull, "w") as file, contextlib.redirect_stdout(file):
        print("nothing")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        total = sum(pool.map(lambda i: i * i, range(5)))
    one, other = socket.socketpair()
    one.send(b"x")
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        return asyncio.run(seven()), total, other.recv(1), base.execute("select 3").fetchall()
def write(x):
    with tempfile.TemporaryFile() as file:
        file.write(b"12")
        return file.tell()
"""
HONEST_VALUE = repr((7, 30, b"x", [(3,)]))
AS_NOBODY = "setpriv --reuid 65534 --regid 65534 --clear-groups"
FEW_RIGHTS = {
    "root without CAP_SYS_ADMIN": "setpriv --bounding-set -sys_admin",
    "the only user of a user namespace": f"{AS_NOBODY} unshare -r",
}


@in_own_mounts
@pytest.mark.parametrize("level", ["namespaces", "filter"])
@pytest.mark.parametrize("prefix", FEW_RIGHTS.values(), ids=FEW_RIGHTS)
def test_root_in_containers(place, level, prefix):
    """Root has its own user namespace where it may not do more, and stays the only user where there is no other."""

    def of(program: str) -> dict:
        job = {"level": level, "program": program, "setup": "SECRET_FOLDER = '/var/tmp'; PARENT = 1"}
        return run_after("", place, job, python=f"{prefix} {SYSTEM_PYTHON}")

    assert of(HONEST)["value"] == HONEST_VALUE
    for name in ("fork_bomb", "namespaces_again", "raises_limits", "signal_by_file", "truncates", "write_outside"):
        report, (loads, tests, values) = of((HOSTILE / f"{name}.py").read_text()), EXPECTED[name]
        assert report["load"] in loads and report["tests"][0] in tests, report
        assert report["tests"][0] != "returned" or report["value"] in values
    assert (
        of("import os\ndef solve(x):\n    return os.getuid() == 0 and int(open('/proc/self/status').read())")["value"] != "True"
    )


@pytest.mark.parametrize(("users", "different"), [(2**32 - 1, True), (65536, True), (65535, False)])
def test_programs_of_root_are_different_users_if_a_container_has_as_many(users, different, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox_stage, "is_mapped", lambda number, file: number < users and (different or number == 65534))
    found = set()
    for pid in (400, 401, 4_194_303):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        found.add(sandbox_stage.user_of_its_own())
    assert len(found) == (3 if different else 1) and all(1000 < uid < users for uid in found)


@pytest.mark.skipif(sys.platform != "linux", reason="user namespaces are Linux's")
def test_every_user_is_mapped_where_there_are_no_user_namespaces():
    assert sandbox_stage.is_mapped(0x70000000, "nothing") and not sandbox_stage.is_mapped(2**32 - 1, "uid_map")


@in_own_mounts
def test_root_that_can_neither_change_nor_be_limited_is_refused(place):
    for prefix, reason in (
        ("unshare -r", "root is the only user of this user namespace, and the number of its processes has no limit"),
        ("setpriv --bounding-set -all", "root cannot become user"),
    ):
        assert reason in run_after("", place, {"level": "filter", "program": ""}, python=f"{prefix} {SYSTEM_PYTHON}")["failed"]


@in_own_mounts
@pytest.mark.parametrize("level", ["namespaces", "filter"])
def test_the_umask_of_the_caller_does_not_matter(place, level):
    assert run_after("umask 077", place, {"level": level, "program": HONEST})["value"] == HONEST_VALUE


@in_own_mounts
@pytest.mark.parametrize("prefix", ["", AS_NOBODY], ids=["root", "nobody"])
@pytest.mark.parametrize("parent", ["/tmp", "/dev/shm"])
def test_python_may_be_in_a_folder_for_temporary_files(place, parent, prefix):
    """Programs write to /tmp of their own, but not to its folders with libraries."""
    program = (
        HONEST
        + """
def replace(x):
    done, own = [], os.path.dirname(os.__file__)
    while own not in ("/tmp", "/dev/shm"):
        for change in (lambda: os.rename(own, "/tmp/other"), lambda: os.chmod(own, 0o777), lambda: open(f"{own}/new", "w").close()):
            try:
                change()
                done.append(own)
            except OSError:
                pass
        own = os.path.dirname(own)
    return done
"""
    )
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        commands = f"cd {folder}; chmod 755 .; mkdir -p a/lib a/bin; cp -L {SYSTEM_PYTHON} a/bin; mount --bind /usr/lib a/lib"
        job = {"level": "namespaces", "program": program, "tests": ["replace(1)", "solve(1)", "write(1)"]}
        report = run_after(commands, place, job, python=f"{prefix} {folder}/a/bin/{Path(SYSTEM_PYTHON).name}")
    assert report.get("value") == "[]" and report["tests"] == ["returned"] * 3, report


# ---- Honest programs ---------------------------------------------------------------------------------------------------------


def test_honest_programs_find_what_they_need(cell, place):
    who, level, _ = cell
    tests = ["solve(1)", "write(1)"] if level == "namespaces" else ["solve(1)"]
    report = run(place, who, {"level": level, "program": HONEST, "tests": tests, "limits": {}})
    assert report["value"] == HONEST_VALUE and set(report["tests"]) == {"returned"}, report


@pytest.fixture
def level():
    """The level that this machine has; without one, there is nothing to test."""
    try:
        return sandbox.sandbox_level()
    except ValueError as error:
        pytest.skip(str(error))


VALUES = [
    None,
    True,
    -7,
    10**40,
    0.1,
    float("inf"),
    "é\n\u2028",
    b"\x00\xff",
    1 - 2j,
    [],
    [1, [2, (3, "x")]],
    (),
    {1, 2},
    frozenset({"a"}),
    {"a": 1, (1, 2): [None], 3: {}},
]


def test_values_come_back_as_they_are(level):
    report = run_program("", [Snippet("eval", repr(value)) for value in VALUES[:5]] + [Snippet("eval", "float('inf')")])
    assert [outcome.value for outcome in report.outcomes] == VALUES[:6]
    report = run_program("", [Snippet("eval", repr(value)) for value in VALUES[6:]])
    assert [outcome.value for outcome in report.outcomes] == VALUES[6:]
    assert [type(outcome.value) for outcome in report.outcomes] == [type(value) for value in VALUES[6:]]


def test_subclasses_of_plain_types_are_what_they_hold(level):
    program = "from collections import *\nP = namedtuple('P', 'x y')\nd = defaultdict(list); d[1].append(2)"
    report = run_program(program, [Snippet("eval", text) for text in ("P(1, 2)", "d", "Counter('aab')", "range(3)", "len")])
    values = [outcome.value for outcome in report.outcomes]
    assert values[:3] == [(1, 2), {1: [2]}, {"a": 2, "b": 1}]
    assert values[3:] == [Other("range range(0, 3)"), Other("builtin_function_or_method <built-in function len>")]


def test_tests_do_not_influence_each_other(level):
    program = "kept = []\ndef solve(x):\n    kept.append(x)\n    return kept"
    report = run_program(program, [Snippet("eval", f"solve({i})") for i in range(3)])
    assert [outcome.value for outcome in report.outcomes] == [[0], [1], [2]]


def test_errors_name_the_line_of_the_program(level):
    program = "def inner(x):\n    return 1 / x\n\ndef solve(x):\n    return inner(x)"
    (outcome,) = run_program(program, [Snippet("eval", "solve(0)")], setup="import math\n\n\n\n").outcomes
    assert outcome.error == sandbox.Raised("ZeroDivisionError", "division by zero", 2)
    load = run_program("def solve(x):\n  return (", []).load
    assert load.error is not None and (load.error.type, load.error.line) == ("SyntaxError", 2)


def test_a_program_may_define_a_function_called_error():
    report = run_program(
        "def error():\n    pass\n\ndef solve(x):\n    return x", [Snippet("eval", f"solve({i})") for i in range(2)]
    )
    assert [outcome.value for outcome in report.outcomes] == [0, 1]


def test_what_a_program_prints_is_kept_up_to_a_limit(level):
    report = run_program("print('x' * 10_000)", [Snippet("eval", "print('hello')")])
    assert report.load.output == "x" * Limits().output_bytes
    assert report.outcomes[0].output.endswith("x")
    assert run_program("", [Snippet("eval", "print('hello')")]).outcomes[0].output == "hello\n"


def test_programs_of_several_threads_run_at_a_time(level):
    """Every one gets its own answer, and no more run than the machine has processors."""
    answers = {}

    def ask(number):
        answers[number] = run_program(f"n = {number}", [Snippet("eval", "n")]).outcomes[0].value

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: number for number in range(6)}


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "750000 100000\n"}, 8),
        ("0::/job/step\n", {"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "max 100000\n"}, 4),
        (
            "3:cpuset:/x\n2:cpu,cpuacct:/docker/1\n",
            {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        ("2:cpu,cpuacct:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        (None, {}, 64),
    ],
)
def test_quotas_of_control_groups_bound_how_many_programs_run(own, files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    if own is not None:
        (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sandbox.processors(tmp_path, tmp_path / "own") == expected


def test_the_same_program_gives_the_same_result_every_time(level):
    text = "list({'a', 'b', 'c', 'd', 'e'})"
    assert len({tuple(run_program("", [Snippet("eval", text)]).outcomes[0].value) for _ in range(3)}) == 1


def test_a_sandbox_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setattr(sandbox, "STAGE", Path("/nonexistent/stage.py"))
    with pytest.raises(SandboxError, match="/nonexistent/stage.py"):
        sandbox._run("", "", [], Limits(), "limits")


@pytest.mark.parametrize(
    ("kind", "text", "said"), [("OSError", "no Landlock", "no Landlock"), ("MemoryError", "", "MemoryError")]
)
def test_a_process_that_cannot_isolate_itself_gives_no_verdict(kind, text, said, monkeypatch):
    result = json.dumps({"error": {"type": kind, "text": text, "line": None, "phase": "sandbox"}})
    report = {"late": False, "signal": None, "lost": 0, "output": "", "isolated": False, "result": result}
    monkeypatch.setattr(sandbox, "_importable", lambda: {"libraries": []})
    monkeypatch.setattr(sandbox, "_ask", lambda *_: [report])
    with pytest.raises(SandboxError, match=f"^{said}$"):
        sandbox._run("", "", [], Limits(), "limits")


def test_a_program_cannot_say_that_the_sandbox_failed(level):
    forged = json.dumps({"error": {"type": "OSError", "text": "no Landlock", "line": None, "phase": "sandbox"}})
    program = f"import os\nos.write(3, {forged.encode()!r})\nos._exit(0)"
    assert run_program(program, [Snippet("eval", "1")]).load.status == "raised"


@pytest.mark.parametrize(
    "lines",
    [
        ["sys.stdout = io.TextIOWrapper(sys.stdout.buffer)", "sys.stderr = io.TextIOWrapper(sys.stderr.buffer)"],
        ["sys.stdout = None"],
        ["sys.stdout.close()"],
    ],
)
def test_a_program_may_replace_its_streams(level, lines):
    report = run_program("\n".join(["import io, sys", *lines]), [Snippet("eval", "1 + 1")])
    assert [(outcome.status, outcome.value) for outcome in report.outcomes] == [("returned", 2)]


def test_tests_share_no_files(level):
    if level != "namespaces":
        pytest.skip("programs write no files at this level, or there is one folder for them")
    program = "import sqlite3\nwith sqlite3.connect('app.db') as base:\n    base.execute('CREATE TABLE users (name TEXT)')\n"
    program += "open('/tmp/log.txt', 'x').close()"
    report = run_program(program, [Snippet("eval", "sorted(__import__('os').listdir('/tmp'))")] * 3)
    assert report.load.status == "returned"
    (files,) = {tuple(outcome.value) for outcome in report.outcomes}
    assert {"app.db", "log.txt"} <= set(files) and ".new" not in files


def test_a_stage_that_hangs_is_ended(level, monkeypatch, tmp_path):
    stage = tmp_path / "stage.py"
    stage.write_text("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)")
    monkeypatch.setattr(sandbox, "STAGE", stage)
    monkeypatch.setattr(sandbox, "MARGIN", 0.2)
    with pytest.raises(SandboxError, match="took longer than 0.5 s"):
        sandbox._run("", "", [], Limits(seconds=0.2, total_seconds=0.1), "limits")


def test_more_tests_than_there_is_time_for(level):
    report = run_program("import time\ntime.sleep(0.2)", [Snippet("eval", "1")] * 3, limits=Limits(total_seconds=0.1))
    assert report.cut_short and report.outcomes[-1].status == "not run"


def test_what_dies_with_the_trainer(level, place, tmp_path):
    """A trainer that is killed leaves no process behind."""
    if level != "namespaces":
        pytest.skip("needs a PID namespace")
    source = "import sys; from pathlib import Path; from firedistill.tasks import sandbox; sandbox.STAGE = Path(sys.argv[1]); "
    source += "sandbox.run_program('import time\\ntime.sleep(100)', [])"
    command = [sys.executable, "-c", source, str(sandbox.STAGE)]
    trainer = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": tempfile.gettempdir()})
    deadline = time.monotonic() + 60
    while len(stages()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    while stages() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stages() == set()
    for left in Path(tempfile.gettempdir()).glob("firedistill-sandbox-*"):
        shutil.rmtree(left)  # an empty folder, which only the trainer could have removed


# ---- Levels ------------------------------------------------------------------------------------------------------------------


def test_a_level_where_modules_cannot_be_imported_is_refused(level, monkeypatch):
    monkeypatch.setattr(sandbox, "_importable", lambda: {"modules": ["decimal", "nowhere"], "libraries": []})
    sandbox._level.cache_clear()
    with pytest.raises(ValueError, match=f"{level}: .* failed .ModuleNotFoundError: No module named 'nowhere'"):
        sandbox.sandbox_level()
    sandbox._level.cache_clear()


def test_a_machine_without_isolation_is_refused(monkeypatch):
    def failing(program, setup, tests, limits, level):
        if level == "limits":
            return sandbox.Report(sandbox.Outcome("returned"), ())
        raise SandboxError("unshare: Operation not permitted")

    monkeypatch.setattr(sandbox, "_run", failing)
    sandbox._level.cache_clear()
    monkeypatch.delenv("FIREDISTILL_SANDBOX", raising=False)
    with pytest.raises(ValueError, match=r"cannot be isolated .*namespaces: unshare.*; filter: .*FIREDISTILL_SANDBOX=limits"):
        sandbox.sandbox_level()
    monkeypatch.setenv("FIREDISTILL_SANDBOX", "limits")
    assert sandbox.sandbox_level() == "limits"
    monkeypatch.setenv("FIREDISTILL_SANDBOX", "jail")
    with pytest.raises(ValueError, match="FIREDISTILL_SANDBOX is 'jail'; expected one of namespaces, filter, limits"):
        sandbox.sandbox_level()
    sandbox._level.cache_clear()


@pytest.mark.parametrize("wanted", ["", "filter"])
def test_python_in_a_private_folder_of_root_is_named(wanted, place, monkeypatch):
    """The other user of programs cannot read it at any level, `limits` among them."""
    private = place / f"private{wanted}"
    (private / "lib").mkdir(parents=True)
    private.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "__file__", str(private / "lib" / "os.py"))
    monkeypatch.setattr(sandbox, "_importable", lambda: {"modules": ["decimal"], "libraries": []})
    lacks = sandbox.Outcome("raised", error=sandbox.Raised("ModuleNotFoundError", "No module named 'decimal'"))
    monkeypatch.setattr(sandbox, "_run", lambda *arguments: sandbox.Report(lacks, ()))
    monkeypatch.setenv("FIREDISTILL_SANDBOX", wanted)
    sandbox._level.cache_clear()
    with pytest.raises(
        ValueError, match=rf"may not enter {private}, .* `chmod o\+x {private}`, or install Python .*uv"
    ) as raised:
        sandbox.sandbox_level()
    assert "limits" not in str(raised.value)
    sandbox._level.cache_clear()


# ---- Comparison --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected", "json", "equal"),
    [
        (3, 3, False, True),
        (3, 4, False, False),
        (True, 1, False, True),
        (0.1 + 0.2, 0.3, False, True),
        (0.3001, 0.3, False, False),
        (3, 3.0, False, True),
        (10**400, 1.0, False, False),
        (float("nan"), float("nan"), False, True),
        ([1, 2], [1, 2], False, True),
        ((1, 2), [1, 2], False, False),
        ((1, 2), [1, 2], True, True),
        ([1, 2], (1, 2), True, False),
        ([1, (2,)], [1, [2]], True, True),
        ([1], [1, 2], False, False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, False, True),
        ({"a": 1, "b": 2}, {"a": 1}, False, False),
        ({1, 2}, {2, 1}, False, True),
        ("3", 3, False, False),
        (None, None, False, True),
        (None, 0, False, False),
        (Other("int 3"), 3, False, False),
        ([Other("x")], [Other("x")], False, False),
    ],
)
def test_comparison(value, expected, json, equal):
    assert matches(value, expected, lists_for_tuples=json) is equal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "1",
        "{",
        '{"value": {"t": "set", "v": [[1]]}}',
        '{"value": {"t": "int", "v": "zz"}}',
        '{"value": {"t": "x", "v": 1}}',
        '{"value": ' + "[" * 100_000,
        '{"value": {"t": "dict", "v": [1]}}',
        '{"value": {"t": "complex", "v": "ab"}}',
        '{"error": 3}',
    ],
    ids=lambda text: text[:40],
)
def test_forged_results_are_unreadable(text):
    report = {"late": False, "signal": None, "lost": 0, "output": "", "result": text or " "}
    assert sandbox._outcome(report, sandbox._parsed(report["result"])).status == "unreadable"


CHANGES = """
import ctypes, os, socket, fcntl, struct, sys
from firedistill.tasks import sandbox_stage as stage
path, allowed = sys.argv[1], sys.argv[2] == "True"
one, _ = socket.socketpair()
stage.prctl(stage.PR_SET_NO_NEW_PRIVS, 1)
stage.install_seccomp(stage.seccomp_program(allowed))
tried = {
    "chmod": lambda: os.chmod(path, 0o600), "utime": lambda: os.utime(path), "chown": lambda: os.chown(path, -1, -1),
    "truncate": lambda: os.truncate(path, 3), "setxattr": lambda: os.setxattr(path, "user.x", b"1"),
    "owner": lambda: fcntl.ioctl(one, 0x8901, struct.pack("i", os.getpid())),
    "write": lambda: open(path, "r+").truncate(2),
}
for name, change in tried.items():
    try:
        change()
        print(name, "done")
    except OSError as error:
        print(name, error.errno)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
@pytest.mark.parametrize("allowed", [True, False])
def test_programs_that_share_a_user_with_the_trainer_cannot_change_its_files(allowed, tmp_path):
    """What Landlock does not cover, the filter of system calls denies."""
    path = tmp_path / "file"
    path.write_text("content")
    ended = subprocess.run([sys.executable, "-c", CHANGES, str(path), str(allowed)], capture_output=True, text=True)
    found = dict(line.split() for line in ended.stdout.splitlines())
    assert found.pop("owner") == str(errno.EPERM) and found.pop("write") == "done", ended.stderr
    if found.get("setxattr") == str(errno.EOPNOTSUPP):
        del found["setxattr"]  # of the file system
    assert set(found.values()) == ({"done"} if allowed else {str(errno.EPERM)}) and len(found) >= 4


def verdict(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What a filter returns for a system call: its errno, or 0 where it is allowed."""
    data = struct.pack("<iIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    lines, at, value = list(struct.iter_unpack("HBBI", program)), 0, 0
    while True:
        code, met, other, k = lines[at]
        if code == 0x06:
            return 0 if k == 0x7FFF0000 else k & 0xFFFF
        if code == 0x20:
            value = struct.unpack_from("<I", data, k)[0]
        elif code == 0x54:
            value &= k
        else:
            at += met if (value == k if code == 0x15 else value >= k) else other
        at += 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_each_architecture(machine, monkeypatch):
    """Interpreted, since a machine runs only its own."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    program, arch, column = (
        sandbox_stage.seccomp_program(False),
        sandbox_stage.AUDIT_ARCH[machine],
        ["x86_64", "aarch64"].index(machine),
    )
    anywhere = 0x7FFF_1234_5673  # an address

    def of(numbers: tuple[int, int], *arguments: int) -> int:
        return verdict(program, arch, numbers[column], *arguments)

    openat, clone, prlimit = (257, 56), (56, 220), (302, 261)
    for flags, expected in ((0, 0), (1, 0), (0o1102, 0), (3, errno.EPERM), (0o1003, errno.EPERM), (0o1000, errno.EPERM)):
        assert of(openat, -100 & 2**64 - 1, anywhere, flags | 0o2000000, 0o666) == expected
        if machine == "x86_64":
            assert verdict(program, arch, 2, anywhere, flags, 0o666) == expected
    assert [of(clone, flags) for flags in (0x3D0F00, 17, 0x10000011)] == [0, 0, errno.EPERM]
    assert [of(prlimit, pid, 7) for pid in (0, 1, anywhere)] == [0, errno.EPERM, errno.EPERM]
    pairs = {(1, 1): 0, (1, 0o2004001): 0, (1, 2): errno.EPERM, (1, 3): errno.EPERM, (1, 5): errno.EPERM, (30, 1): errno.EPERM}
    assert {pair: of((53, 199), *pair) for pair in pairs} == pairs
    assert [of((435, 435)), of((437, 437))] == [errno.ENOSYS] * 2
    assert all(of(numbers) == errno.EPERM for numbers in (sandbox_stage.DENIED | sandbox_stage.CHANGING_FILES).values())
    assert of((0, 63)) == 0 and verdict(program, 0x40000003, 3) == errno.EPERM  # `read`, here and of another architecture
