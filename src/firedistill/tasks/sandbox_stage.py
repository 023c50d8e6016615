"""The inner side of the sandbox: a script that an interpreter of its own runs, never imported by the package.

Stages, each a process:
    1. This script, started by `sandbox.py`. It reads a job from stdin and isolates itself from the machine.
    2. At the level "namespaces", the first process of a new PID namespace, which builds the view of the file system.
    3. One process per test. It restricts itself, runs the program and writes one JSON value to a pipe of its own.

Only the third kind runs text of a model. The second one (the first, at other levels) judges how it ended, kills whatever it started,
and writes the report to stdout, which no process of the third kind holds.

Uses the standard library alone, since neither the package nor its dependencies are visible here.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import importlib
import json
import os
import platform
import re
import resource
import select
import signal
import stat
import struct
import sys
import time
import types
from contextlib import suppress
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)

# ---- System calls --------------------------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag of `clone`
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_OPTIONS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8}
# One user per sandbox: of a range that no distribution assigns, else, in containers with 65,536 users, of the one for dynamic users.
FIRST_UID, FIRST_DYNAMIC_UID, DYNAMIC_UIDS, NOBODY = 0x70000000, 61184, 4336, 65534

# Denied system calls: (number on x86_64, on aarch64).
DENIED: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "memfd_create": (319, 279),  # memory outside the limit on address space
    "memfd_secret": (447, 447),
    # Of System V, what gets an identifier and what uses one, since identifiers of other processes can be listed and guessed
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "personality": (135, 92),
    # What reaches other processes of the same user, also those outside where there is no PID namespace.
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
# At the level `filter`, programs share a user with the trainer unless that is root, and Landlock does not cover these calls, `truncate`
# only from Linux 6.2 on. On aarch64, some are functions of the C library.
CHANGING_FILES: dict[str, tuple[int, int]] = {
    "truncate": (76, 45),
    "chmod": (90, 53),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 54),
    "lchown": (94, 54),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, 88),
    "utimes": (235, 88),
    "futimesat": (261, 88),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
ALL_BITS = 0xFFFFFFFF
NONE = 0xFFFFFFFF  # no system call: aarch64 lacks `open`
OPEN, OPENAT = (2, NONE), (257, 56)
# Denied values: the call, the position of an argument, the bits of it that count (of the lower 32), their value.
DENIED_VALUES: list[tuple[tuple[int, int], int, int, int]] = [
    ((72, 25), 1, ALL_BITS, 8),  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX: a signal to any process of the user
    ((72, 25), 1, ALL_BITS, 10),
    ((72, 25), 1, ALL_BITS, 15),
    ((16, 29), 1, ALL_BITS, 0x5412),  # ioctl TIOCSTI: input of a terminal
    ((16, 29), 1, ALL_BITS, 0x8901),  # FIOSETOWN, SIOCSPGRP: as F_SETOWN
    ((16, 29), 1, ALL_BITS, 0x8902),
    ((157, 167), 0, ALL_BITS, PR_SET_PDEATHSIG),
    # Before Linux 6.2, Landlock sees neither an access mode of 3 nor O_TRUNC: these flags empty any file of the user.
    (OPEN, 1, 3, 3),
    (OPENAT, 2, 3, 3),
    (OPEN, 1, 0o1003, 0o1000),  # O_RDONLY | O_TRUNC
    (OPENAT, 2, 0o1003, 0o1000),
]
# The same for calls of which every other value is denied.
REQUIRED_VALUES: list[tuple[tuple[int, int], int, int, int]] = [
    ((56, 220), 0, NEW_NAMESPACES, 0),  # clone
    # socketpair: AF_UNIX and SOCK_STREAM, which event loops need; a datagram can be sent to any address.
    ((53, 199), 0, ALL_BITS, 1),
    ((53, 199), 1, 0xF, 1),
    ((302, 261), 0, ALL_BITS, 0),  # prlimit: 0 is the caller
]
# Calls with flags in memory, which a filter cannot read: they seem to be missing, so that the C library uses older ones.
ABSENT: dict[str, tuple[int, int]] = {"clone3": (435, 435), "openat2": (437, 437)}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_FS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: Any, more: Any = 0) -> None:
    arguments = (ctypes.c_ulong(value), more if more else ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    checked(libc.prctl(option, *arguments), f"prctl {option}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    checked(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def machine_column() -> int:
    """The position of this architecture in the tables above; raises OSError if it has none."""
    if platform.machine() not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}")
    return list(AUDIT_ARCH).index(platform.machine())


def seccomp_program(changing_files: bool) -> bytes:
    """A filter in the kernel's BPF: what is denied fails with EPERM, everything else is allowed.

    Args:
        changing_files: whether `CHANGING_FILES` are allowed.

    Raises:
        OSError: the system calls of this architecture are not known.
    """
    machine, column = platform.machine(), machine_column()
    load, equal, above, mask, back = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, deny, absent = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, AUDIT_ARCH[machine]),
        (back, 0, 0, deny),
        (load, 0, 0, 0),
    ]
    if machine == "x86_64":
        code += [(above, 0, 1, 0x40000000), (back, 0, 0, deny)]  # the x32 numbers
    for numbers in (DENIED if changing_files else DENIED | CHANGING_FILES).values():
        code += [(equal, 0, 1, numbers[column]), (back, 0, 0, deny)]
    for numbers in ABSENT.values():
        code += [(equal, 0, 1, numbers[column]), (back, 0, 0, absent)]
    for table, skipped in ((DENIED_VALUES, 0), (REQUIRED_VALUES, 1)):  # lines to skip if the value is met: none, or the verdict
        for numbers, argument, bits, value in table:
            code += [(equal, 0, 5, numbers[column]), (load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits)]
            code += [(equal, skipped, 1 - skipped, value), (back, 0, 0, deny), (load, 0, 0, 0)]
    code.append((back, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *line) for line in code)


def install_seccomp(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program(len(program) // 8, program)))


def install_landlock(readable: list[str], writable: list[str]) -> None:
    """Files outside these folders cannot be opened, nor processes outside be traced or signalled, as far as the kernel has it.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = checked(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "Landlock")
    handled = LANDLOCK_FS[min(version, 5)]
    attributes = struct.pack("QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = checked(libc.syscall(LANDLOCK_CREATE, attributes[:size], ctypes.c_size_t(size), 0), "Landlock")
    for paths, access in ((readable, 4 | 8), (writable, handled)):
        for path in paths:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
            allowed = access & handled if is_folder else access & handled & (1 | 2 | 4 | 1 << 14)
            rule = struct.pack("=Qi", allowed, handle)
            checked(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0), f"Landlock, {path}")
            os.close(handle)
    checked(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


# ---- Isolation -----------------------------------------------------------------------------------------------------------------

NEW_TMP = "/tmp/.new"  # where the /tmp of a process is made
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]

# Modules of the standard library that need shared libraries, which may be in any folder (Spack, EasyBuild, Nix, Homebrew).
EXTENSIONS = ["bz2", "ctypes", "decimal", "hashlib", "lzma", "sqlite3", "uuid", "xml.parsers.expat", "zlib"]


def libraries() -> list[str]:
    """The folders with the standard library and the shared libraries, without those inside another one."""
    base = os.path.join(sys.base_prefix, "lib")
    wanted = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", base, os.path.dirname(os.__file__)]
    found: list[str] = []
    for path in map(os.path.realpath, wanted):
        if os.path.isdir(path) and not any(path == other or path.startswith(other + "/") for other in found):
            found.append(path)
    return found


def importable() -> dict[str, list[str]]:
    """The modules of `EXTENSIONS` that this interpreter has, and the shared libraries of theirs that are not in `libraries()`."""
    modules = []
    for name in EXTENSIONS:
        with suppress(ImportError):
            importlib.import_module(name)
            modules.append(name)
    mapped: set[str] = set()
    if sys.platform == "linux":
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            mapped = {fields[5].rstrip("\n") for line in file if len(fields := line.split(maxsplit=5)) == 6}
    folders = tuple(f"{folder}/" for folder in libraries())
    shared = sorted(path for path in mapped if re.search(r"\.so(\.[^/]*)?$", path) and not path.startswith(folders))
    return {"modules": modules, "libraries": shared}


def user_of_its_own() -> int | None:
    """The user that programs become where the caller is root; None if it is not, or if it is the only user of its user namespace.

    Raises:
        OSError: there is no other user, and the kernel does not limit the processes of this one, which is root outside as well.
    """
    if os.geteuid() != 0:
        return None
    for uid in (FIRST_UID + os.getpid(), FIRST_DYNAMIC_UID + os.getpid() % DYNAMIC_UIDS, NOBODY):
        if is_mapped(uid, "uid_map") and is_mapped(uid, "gid_map"):
            return uid
    if not limits_processes():
        raise OSError(errno.EPERM, "root is the only user of this user namespace, and the number of its processes has no limit")
    return None


def is_mapped(number: int, file: str) -> bool:
    """Whether the user namespace has a user, or group, of this number."""
    if not os.path.exists(f"/proc/self/{file}"):
        return True  # the kernel has no user namespaces
    with open(f"/proc/self/{file}") as ranges:
        return any(int(first) <= number < int(first) + int(count) for first, _, count in map(str.split, ranges))


def limits_processes() -> bool:
    """Whether RLIMIT_NPROC has an effect for this user."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        try:
            os.fork()
        except OSError:
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def enter_namespaces(isolation: Isolation) -> None:
    """New namespaces for this process; PIDs are new for those that it forks.

    Root without CAP_SYS_ADMIN, as in many containers, becomes the user of the programs here, and has a user namespace like other users.

    Raises:
        OSError: the kernel or its settings do not permit them.
    """
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    if isolation.uid is not None:
        if libc.unshare(flags) == 0:
            return
        isolation.drop_root()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # cleared by the change of user
        prctl(PR_SET_DUMPABLE, 1)  # also cleared; without it, /proc/self belongs to root
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(flags | NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mounts_from(folder: str) -> list[tuple[str, int]]:
    """The mount points at and below a folder, with the flags that a user namespace must not take away.

    Raises:
        OSError: there is none; the name of the folder may go through a symbolic link.
    """
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(" ")
            path = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            if f"{path}/".startswith(f"{folder}/"):
                found.append((path, sum(MOUNT_OPTIONS.get(option, 0) for option in fields[5].split(","))))
    if not found:
        raise OSError(errno.EINVAL, f"{folder} is no mount point in /proc/self/mountinfo")
    return found


def covers_in_tmp() -> list[str]:
    """The folders in /tmp that hold libraries."""
    return sorted({"/".join(path.split("/")[:3]) for path in libraries() if path.startswith("/tmp/")})


def fresh_tmp(covers: list[str], bytes_of_files: int) -> None:
    """Give this process an empty /tmp in memory, which ends with it and with what it starts."""
    checked(libc.unshare(NEWNS), "unshare")
    mount("tmpfs", NEW_TMP, "tmpfs", MS_NOSUID | MS_NODEV, f"size={bytes_of_files},nr_inodes=4096,mode=1777")
    for cover in covers:
        os.mkdir(inner := NEW_TMP + cover.removeprefix("/tmp"))
        mount(cover, inner, None, MS_BIND | MS_REC)
    mount(NEW_TMP, "/tmp", None, MS_BIND | MS_REC)
    os.chdir("/tmp")


def private_view(scratch: str) -> None:
    """Replace the file system by an empty one in memory with the libraries and some devices, all of it read-only.

    Args:
        scratch: an empty folder to build it on.
    """
    os.umask(0o022)  # the user of the programs is another one
    scratch, folders = os.path.realpath(scratch), libraries()
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.mkdir(f"{scratch}/dev")
    os.mkdir(f"{scratch}/tmp")
    os.mkdir(f"{scratch}{NEW_TMP}")
    covers = [scratch + cover for cover in covers_in_tmp()]
    for cover in covers:  # a mount point cannot be renamed, so that no program puts its own libraries there
        os.mkdir(cover)
        mount(cover, cover, None, MS_BIND)
    for path in folders:
        target = scratch + path
        os.makedirs(target, exist_ok=True)
        mount(path, target, None, MS_BIND | MS_REC)
        for inner, kept in mounts_from(target):
            mount(None, inner, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)
    for cover in covers:
        mount(None, cover, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    for link in ("/lib", "/lib64", "/lib32", "/usr/lib64"):
        if os.path.islink(link) and not os.path.lexists(scratch + link):
            os.makedirs(os.path.dirname(scratch + link), exist_ok=True)
            os.symlink(os.readlink(link), scratch + link)
    for device in DEVICES:
        with open(scratch + device, "w"):
            pass
        mount(device, scratch + device, None, MS_BIND)
    mount(None, scratch, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(scratch)
    checked(libc.syscall(DENIED["pivot_root"][machine_column()], b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def set_limits(limits: dict[str, Any], processes: int) -> None:
    for kind, soft in (
        ("CORE", 0),
        ("CPU", int(limits["cpu_seconds"])),
        ("FSIZE", limits["file_bytes"]),
        ("NOFILE", limits["files"]),
        ("NPROC", processes),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
        ("STACK", 16 << 20),
        ("AS", limits["memory_bytes"]),
    ):
        number = getattr(resource, f"RLIMIT_{kind}", None)
        if number is not None:
            most = resource.getrlimit(number)[1]
            hard = soft + (kind == "CPU")  # a second to report in
            if most != resource.RLIM_INFINITY:
                soft, hard = min(soft, most), min(hard, most)
            try:
                resource.setrlimit(number, (soft, hard))
            except (ValueError, OSError):
                if sys.platform == "linux":  # macOS has no limit on address space
                    raise


def processes_of_user() -> int:
    """Threads of this user on the machine, which count towards the limit where the user is not changed."""
    count = 0
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry}/task"))
        except OSError:
            continue
    return count


def prefer_to_kill() -> None:
    """If the machine runs out of memory, this process is ended before others."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


class Isolation:
    """What each process of a test does to itself, prepared before the first one."""

    def __init__(self, job: dict[str, Any]):
        self.level, self.limits, self.scratch = job["level"], job["limits"], job["scratch"]
        self.uid = user_of_its_own()
        self.filter: bytes | None = None
        self.processes, self.covers = self.limits["processes"], covers_in_tmp()
        if self.level != "limits":
            try:
                self.filter = seccomp_program(self.level == "namespaces" or self.uid is not None)
            except OSError:
                if self.level == "filter":
                    raise

    def apply(self) -> None:
        """Give up every right that the program does not need. Nothing here can be taken back."""
        if self.level == "namespaces":
            fresh_tmp(self.covers, self.limits["file_bytes"])
        os.umask(0o077)
        set_limits(self.limits, self.processes)
        if sys.platform == "linux" and self.level != "namespaces":  # there, the namespace's first process has done it
            prefer_to_kill()
        self.drop_root()
        if self.level == "limits":
            return
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        none = struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)
        checked(libc.capset(struct.pack("Ii", 0x20080522, 0), none), "capset")
        if self.level == "filter":
            install_landlock(libraries(), [*filter(os.path.exists, DEVICES)])
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # cleared by the change of user
        if self.filter is not None:
            install_seccomp(self.filter)

    def drop_root(self) -> None:
        """Become the user of the programs, if there is one, once."""
        if self.uid is None:
            return
        try:
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
        except OSError as error:
            raise OSError(
                error.errno, f"root cannot become user {self.uid} (CAP_SETUID, CAP_SETGID): {error.strerror}"
            ) from error
        self.uid = None


# ---- Values --------------------------------------------------------------------------------------------------------------------


def encode(value: Any, depth: int = 0) -> Any:
    """A value in JSON. Methods that a program may have overridden are not called; other types become their `repr`."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -(2**53) < number < 2**53 else {"t": "int", "v": hex(number)}
    if isinstance(value, float):
        return {"t": "float", "v": float.__repr__(value)}
    if depth > 100:
        raise ValueError("the value is nested more than 100 levels deep")
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in list.__iter__(value)]
    sequences: tuple[Any, ...] = (tuple, set, frozenset)
    for plain in sequences:
        if isinstance(value, plain):
            return {"t": plain.__name__, "v": [encode(item, depth + 1) for item in plain.__iter__(value)]}
    if isinstance(value, dict):
        pairs = [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)]
        return {"t": "dict", "v": pairs}
    if isinstance(value, bytes | bytearray):
        return {"t": "bytes", "v": bytes(value).hex()}
    if kind is complex:
        return {"t": "complex", "v": [value.real, value.imag]}
    return {"t": "other", "v": f"{kind.__name__} {repr(value)[:500]}"}


def described(error: BaseException) -> dict[str, Any]:
    """An exception: its type, its text, and the last line of the program that it passed."""
    found: dict[str, Any] = {"type": type(error).__name__, "text": "", "line": None}
    try:
        found["text"] = str(error)[:500]
    except BaseException:
        found["text"] = "an error whose text cannot be read"
    if isinstance(error, SyntaxError):
        found.update(type="SyntaxError", text=str(error.msg)[:500], line=error.lineno)
        return found
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<answer>":
            found["line"] = trace.tb_lineno
        trace = trace.tb_next
    return found


def remarks(tree: ast.Module) -> list[str]:
    """Imports and variables of functions that are never used, bare excepts, and mutable defaults."""
    found = []
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
            found += [
                (node.lineno, f"{name} is imported and never used") for name in names if name not in used | {"*", "annotations"}
            ]
        elif isinstance(node, ast.FunctionDef):
            for part in ast.walk(node):
                if isinstance(part, ast.Assign) and len(part.targets) == 1 and isinstance(part.targets[0], ast.Name):
                    name = part.targets[0].id
                    if name not in used and not name.startswith("_"):
                        found.append((part.lineno, f"{name} is assigned and never used"))
            if any(isinstance(default, ast.List | ast.Dict | ast.Set) for default in node.args.defaults):
                found.append((node.lineno, f"{node.name} has a mutable default argument"))
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append((node.lineno, "a bare except hides every error"))
    return [f"line {line}: {text}" for line, text in sorted(set(found))]


ISOLATED = b"\n"  # the first that a process writes, before anything of the program runs


# ---- Tests ---------------------------------------------------------------------------------------------------------------------


def run_test(isolation: Isolation, job: dict[str, Any], test: dict[str, str], result: int) -> None:
    """In a process of its own: run setup and program, then the test; write what it gives as JSON. Never returns."""
    me, kind = os.getpid(), test["kind"]
    report: dict[str, Any] = {}
    try:
        phase = "sandbox"
        isolation.apply()
        os.write(result, ISOLATED)
        phase = "program"
        if kind == "load":
            tree = ast.parse(job["program"])
            report = {
                "remarks": remarks(tree)[:20],
                "defined": [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)][:20],
            }
        module = types.ModuleType("answer")
        sys.modules["answer"] = module
        exec(compile(job["setup"], "<setup>", "exec", dont_inherit=True), module.__dict__)
        exec(compile(job["program"], "<answer>", "exec", dont_inherit=True), module.__dict__)
        phase = "test"
        if kind == "eval":
            report["value"] = encode(eval(compile(test["text"], "<test>", "eval", dont_inherit=True), module.__dict__))
        elif kind == "exec":
            exec(compile(test["text"], "<test>", "exec", dont_inherit=True), module.__dict__)
            report["value"] = True
        else:
            report["value"] = None
    except BaseException as error:
        memory = isinstance(error, MemoryError)
        failure = {"type": "MemoryError", "text": "", "line": None} if memory else described(error)
        report = {"error": {**failure, "phase": phase}, **report}  # first, where `run_all` looks for it
    if os.getpid() == me:
        with suppress(BaseException):  # the program may have closed or replaced it
            sys.stdout.flush()
        text = json.dumps(report).encode("utf-8", "surrogatepass")
        while text:
            text = text[os.write(result, text) :]
    os._exit(0)


def reap(child: int, namespace: bool) -> None:
    """Kill and collect the process of a test with everything that it has started."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL) if namespace else kill_descendants(child)
        time.sleep(0.001)


def kill_descendants(child: int) -> None:
    """Stop all descendants, so that none forks while others are found, then kill them."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    stopped: set[int] = set()
    while found := descendants() - stopped:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants() -> set[int]:
    """PIDs of all descendants of this process, to which orphans among them are given."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc") if sys.platform == "linux" else []:
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    parents[int(entry)] = int(fields[1])
            except OSError:
                continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def ended(isolation: Isolation, job: dict[str, Any], test: dict[str, str], seconds: float) -> dict[str, Any]:
    """Run one test in a process of its own; how it ended, what it wrote, and what it printed, both cut at their limits."""
    limits, namespace = isolation.limits, isolation.level == "namespaces"
    result, result_in = os.pipe()
    output, output_in = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(output_in, 1)
            os.dup2(output_in, 2)
            os.dup2(result_in, 3)
            os.closerange(4, 4096)
            sys.stdin = os.fdopen(0, closefd=False)
            sys.stdout = os.fdopen(1, "w", closefd=False, errors="backslashreplace")
            sys.stderr = sys.stdout
            # A program that replaces a stream does not close it then.
            sys.__dict__.update(__stdout__=sys.stdout, __stderr__=sys.stdout)
            run_test(isolation, job, test, 3)
        finally:
            os._exit(1)
    os.close(result_in)
    os.close(output_in)
    taken: dict[int, bytearray] = {result: bytearray(), output: bytearray()}
    most = {result: len(ISOLATED) + limits["result_bytes"], output: limits["output_bytes"]}
    lost = {result: 0, output: 0}
    poll = select.poll()
    for pipe in taken:
        os.set_blocking(pipe, False)
        poll.register(pipe, select.POLLIN)
    waiting, deadline, status = set(taken), time.monotonic() + seconds, None

    def read(pipe: int) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return False
        room = most[pipe] - len(taken[pipe])
        taken[pipe] += data[:room]
        lost[pipe] += max(len(data) - room, 0)
        if not data and pipe in waiting:
            waiting.discard(pipe)
            poll.unregister(pipe)
        return bool(data)

    while status is None and (left := deadline - time.monotonic()) > 0:
        for pipe, _ in poll.poll(min(left, 0.05 if waiting else 0.001) * 1000):
            read(pipe)
        pid, code = os.waitpid(child, os.WNOHANG)
        status = code if pid else None
    late = status is None
    reap(child, namespace)
    for pipe in taken:
        for _ in range(16):  # what was written before the end, at most the capacity of a pipe
            if pipe not in waiting or not read(pipe):
                break
        os.close(pipe)
    return {
        "late": late,
        "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
        "isolated": taken[result].startswith(ISOLATED),
        "result": taken[result].removeprefix(ISOLATED).decode("utf-8", "replace"),
        "lost": lost[result],
        "output": taken[output].decode("utf-8", "replace"),
    }


def run_all(job: dict[str, Any], isolation: Isolation) -> list[dict[str, Any]]:
    """Load the program, then run its tests in turn, up to one that takes too long. If it cannot be loaded, none runs.

    No test starts after the total time.
    """
    end = time.monotonic() + job["limits"]["total_seconds"]
    reports: list[dict[str, Any]] = []
    for test in [{"kind": "load", "text": ""}, *job["tests"]]:
        if time.monotonic() > end:
            break
        reports.append(ended(isolation, job, test, job["limits"]["seconds"]))
        first, last = reports[0], reports[-1]
        if first["signal"] or not first["result"] or first["result"].startswith('{"error"'):
            break
        if last["late"] or last["signal"] == signal.SIGXCPU:  # so would others
            break
    return reports


def main() -> int:
    job = json.loads(sys.stdin.buffer.read())
    if not job:
        print(json.dumps(importable()))
        return 0
    os.environ.pop("LD_LIBRARY_PATH", None)  # has had its effect
    for path in job["libraries"]:
        ctypes.CDLL(path)  # found from here on without its file
    level, linux = job["level"], sys.platform == "linux"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if linux:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit()) if linux else (0,)
    isolation = Isolation(job)
    if linux and isolation.uid is None and (level != "namespaces" or kernel < (5, 14)):
        isolation.processes += processes_of_user()
    if level == "namespaces":
        enter_namespaces(isolation)
        child = os.fork()
        if child:
            os.close(1)
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status) & 0x7F
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prefer_to_kill()
        private_view(job["scratch"])
    else:
        if linux:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        os.chdir(job["scratch"])
        if isolation.uid is not None:
            os.chmod(job["scratch"], 0o777)
    reports = json.dumps(run_all(job, isolation)).encode()
    while reports:
        reports = reports[os.write(1, reports) :]
    if level == "namespaces":
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
