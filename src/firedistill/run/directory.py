"""The run directory: one trainer at a time, and only what a run wrote is ever deleted.

`RunLock` keeps `<run>/.lock` from before the first write to the end of training, by two means:

- A POSIX record lock. The operating system releases it when the process ends, however it ends, and a forked child does not keep it.
- A heartbeat: the holder updates the file every `HEARTBEAT` seconds. It protects the run from hosts that do not see the lock, such as
  on a network file system without locks. A holder without a heartbeat for `GONE_AFTER` seconds is dead.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from firedistill.files import REPLACED, UNFINISHED, discard, naming, read_json, write_text

try:
    import fcntl
except ImportError:  # Windows, where the heartbeat alone protects a run
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

HEARTBEAT, GONE_AFTER = 10.0, 120.0
FINISHED = "finished.json"
RUN_NAME = "run_name.txt"
# What a run writes. `metrics.jsonl` comes last: it marks a folder as a run, also for a removal that was interrupted.
ROLLOUT_ADAPTERS = "rollout-adapters"
RUN_FILES = [
    FINISHED,
    RUN_NAME,
    ROLLOUT_ADAPTERS,
    "judge",
    "adapter",
    "curves.png",
    "config.yaml",
    "evals.jsonl",
    "README.md",
    "metrics.jsonl",
]
CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
ROLLOUTS = re.compile(r"(step|eval|sampled)_(\d{6,16})(?:-(\d{6,16}))?\.parquet")
ATTRIBUTION = re.compile(r"step_(\d{6,16})\.json")


class RunDirectoryError(ValueError):
    """A folder that cannot be, or is no longer, the directory of this run; the message says why and what to do."""


def rollout_file(kind: str, first: int, last: int | None = None) -> str:
    """The name of a file under `rollouts/`: `eval_000010.parquet`, or `step_000001-000100.parquet`.

    Args:
        kind: "step", "eval" or "sampled".
        last: the last step of a file of several.
    """
    return f"{kind}_{first:06d}{'' if last is None else f'-{last:06d}'}.parquet"


def rollouts_in(name: str) -> tuple[str, range] | None:
    """Kind and steps in a name that `rollout_file` returned; None for the name of another file."""
    found = ROLLOUTS.fullmatch(name)
    return (found[1], range(int(found[2]), int(found[3] or found[2]) + 1)) if found else None


def make_folder(folder: Path, option: str = "output_dir") -> bool:
    """Make the folder that an option names; whether it did not exist. Raises RunDirectoryError if it cannot be made."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{option} {folder} cannot be made ({error.strerror}): name another one") from error
    return new


@contextmanager
def temporary_folder(folder: Path) -> Iterator[None]:
    """A run directory for what needs one and writes nothing; removed again if it is new."""
    new = make_folder(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            if new:
                folder.rmdir()


def is_run(folder: Path) -> bool:
    """Whether a run has been started in the folder."""
    return (folder / "metrics.jsonl").exists()


def refuse_other_files(folder: Path) -> None:
    """Raise RunDirectoryError if no run was started in the folder, and it holds files that a run would replace, or is a file itself."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise RunDirectoryError(f"{folder} is not a folder; name another --output_dir")
    if (folder / "plan.json").is_file():
        raise RunDirectoryError(f"{folder} holds a suite, which a run cannot share; name another --output_dir")
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name))
    found = [name for name in RUN_FILES if os.path.lexists(folder / name)] + checkpoints
    if found and not is_run(folder):
        fix = ", or restore its metrics.jsonl (an empty file resumes without the rows)" if checkpoints else ""
        raise RunDirectoryError(
            f"{folder} is not a run directory, and a run would replace its {', '.join(found)}; name another --output_dir{fix}"
        )


def remove_run(folder: Path, keep_replies: bool = False) -> None:
    """Delete what a run has written in the folder, and nothing else.

    Args:
        keep_replies: those of a judge stay, and an empty `metrics.jsonl`, which marks the folder as that of a run.

    Raises:
        RunDirectoryError: see `refuse_other_files`; or a checkpoint cannot be deleted.
    """
    refuse_other_files(folder)
    if not is_run(folder):
        return
    for path in [*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REPLACED}*"), *folder.glob("checkpoint-*")]:
        if path.name.startswith((UNFINISHED, REPLACED)) or CHECKPOINT.fullmatch(path.name):
            remove(path)
            if CHECKPOINT.fullmatch(path.name) and os.path.lexists(path):  # the new run would resume from it
                raise RunDirectoryError(f"{path} cannot be deleted: delete it yourself, or name another --output_dir")
    for inner, written in ((folder / "rollouts", rollouts_in), (folder / "attribution", ATTRIBUTION.fullmatch)):
        for path in inner.glob("*"):
            if written(path.name.removeprefix(UNFINISHED)):
                remove(path)
        with suppress(OSError):  # it does not exist, or holds other files
            inner.rmdir()
    if keep_replies:
        write_text(folder / "metrics.jsonl", "")
    for name in RUN_FILES:
        if not (keep_replies and name in ("judge", "metrics.jsonl")):
            remove(folder / name)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        discard(path)
    else:
        path.unlink(missing_ok=True)


def mark_finished(folder: Path, step: int) -> None:
    """Record that the run has ended after optimizer step `step` with everything written; the last act of a run."""
    write_text(folder / FINISHED, json.dumps({"step": step}) + "\n")


def finished_step(folder: Path) -> int | None:
    """The step at which the run ended, or None if it has not ended.

    Raises:
        OSError: the system cannot read the record, so that a run which has ended may be there.
    """
    try:
        step = read_json(folder / FINISHED, ValueError).get("step")
    except ValueError:
        return None
    return step if isinstance(step, int) else None


# ---- One trainer at a time -------------------------------------------------------------------------------------------------


def lock_domain() -> str:
    """What processes with common locks share: a boot of an operating system, or else the host's name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


class RunLock:
    """Excludes other trainers from a run directory while it is held. Use it as a context; it can be nested within a process.

    Args:
        folder: the run directory; created when the lock is taken.

    Raises:
        RunDirectoryError: on entering, if another process trains in this directory.
    """

    held: dict[Path, RunLock] = {}

    def __init__(self, folder: str | Path):
        self.folder = Path(os.path.abspath(folder))  # without "..": one name per folder
        self.path = self.folder / ".lock"
        self.depth = 0

    def __enter__(self) -> RunLock:
        outer = self.held.setdefault(self.path, self)
        if outer.depth == 0:
            try:
                with naming(self.path):
                    outer._take()
            except BaseException:
                del self.held[self.path]
                raise
        outer.depth += 1
        return outer

    def __exit__(self, *error: object) -> None:
        outer = self.held.get(self.path)
        if outer is None or outer.process != os.getpid():
            return  # a forked child leaves its parent's lock alone
        outer.depth -= 1
        if outer.depth == 0:
            outer._release()
            del self.held[self.path]

    def check(self) -> None:
        """Raise RunDirectoryError if the run directory has been removed or replaced, or another process has taken the lock."""
        if not self._in_place() or self._holder() != self.owner:
            raise RunDirectoryError(
                f"{self.folder} was removed or replaced while the run was training, or another process trains there; this run stops"
            )

    # The file is opened once: closing any other handle of a process would release its record lock.

    def _take(self) -> None:
        self.created, self.locks = make_folder(self.folder), fcntl is not None
        self.file = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)  # noqa: SIM115
        try:
            if not self._lock():
                raise self._refusal(self._holder())
            self._wait_for_other_machines()
            in_place = self._in_place()
        except BaseException:
            self.file.close()
            raise
        if not in_place:  # the last holder has removed the file since it was opened
            self.file.close()
            return self._take()
        self.process = os.getpid()
        self.owner = {"host": socket.gethostname(), "pid": self.process, "machine": lock_domain(), "id": uuid.uuid4().hex}
        self.file.seek(0)
        self.file.truncate()
        self.file.write(json.dumps(self.owner).encode())
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def _release(self) -> None:
        self._ended.set()
        with suppress(OSError):
            if self._in_place() and self._holder() == self.owner:
                self.path.unlink()
                if self.created:
                    self.folder.rmdir()  # nothing was written, as where the settings are refused
        self.file.close()

    def _in_place(self) -> bool:
        """Whether the open file is the one in the run directory."""
        try:
            there, ours = os.stat(self.path), os.fstat(self.file.fileno())
        except OSError:
            return False
        return (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev)

    def _lock(self) -> bool:
        """Take the record lock; False if another process has it. True where the file system has no locks."""
        if fcntl is None:
            return True
        try:
            fcntl.lockf(self.file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if self.locks:
                logger.warning("%s cannot be locked (%s); its heartbeat alone protects the run", self.path, error)
            self.locks = False
        return True

    def _holder(self) -> dict[str, Any]:
        """What the holder has written; empty for a new file."""
        self.file.seek(0)
        try:
            content = json.loads(self.file.read(4096) or b"{}")
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _wait_for_other_machines(self) -> None:
        """Return once the recorded holder, if it is on another machine, is dead.

        Raises:
            RunDirectoryError: its heartbeat changes.
        """
        holder, beat = self._holder(), os.fstat(self.file.fileno()).st_mtime_ns
        if not holder or (self.locks and holder.get("machine") == lock_domain()):
            return
        age = self._now() - beat / 1e9
        if age < GONE_AFTER:
            logger.warning(
                "%s: waiting up to %.0f s to see whether %s is alive", self.path, GONE_AFTER - age, described(holder)
            )
        while age < GONE_AFTER:
            time.sleep(min(1.0, HEARTBEAT / 4))
            if os.fstat(self.file.fileno()).st_mtime_ns != beat or self._holder() != holder:
                raise self._refusal(self._holder())
            age = self._now() - beat / 1e9

    def _now(self) -> float:
        """The time by the clock of the file system, which may be that of a server."""
        with tempfile.TemporaryFile(dir=self.folder) as probe:
            return os.fstat(probe.fileno()).st_mtime

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            with suppress(OSError):
                os.utime(self.path)
                self._lock()  # again, in case user code has opened and closed the file

    def _refusal(self, holder: dict[str, Any]) -> RunDirectoryError:
        return RunDirectoryError(
            f"{described(holder)} is training in {self.folder}: wait until it has ended, stop it, or name another --output_dir"
        )


def described(holder: dict[str, Any]) -> str:
    """`process 4711 on host gpu-3`, as far as it is known."""
    return f"process {holder['pid']} on host {holder['host']}" if {"pid", "host"} <= holder.keys() else "another process"
