"""The system calls that make a sandbox, by ctypes: namespaces, mounts, Landlock, seccomp.

Each raises OSError with its name. Standard library alone: the zygote runs this file, before
anything else is there to be imported.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_CAPBSET_DROP = 1, 4, 15, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 36, 38, 22
RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x04, 0x08
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_EMPTY_PATH = 1, 4
_SECCOMP_FILTER = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_LANDLOCK_VERSION = 1
_FILES = (1 << 13) - 1
"""Access rights to files of Landlock's first version; later ones add to them."""
_RIGHTS = {1: _FILES, 2: _FILES | 1 << 13, 3: _FILES | 1 << 13 | 1 << 14}
_READ = 1 | 1 << 2 | 1 << 3
"""Execute, read files, read folders."""
_OF_A_FILE = 1 | 1 << 1 | 1 << 2 | 1 << 14
_CAPABILITIES = 64
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_OPEN_TREE, _MOVE_MOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 437, 442
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(value: int, name: str) -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return value


def _syscall(number: int, name: str, *arguments: Any) -> int:
    wide = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return _check(_libc.syscall(ctypes.c_long(number), *wide), name)


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def bring_up(fd: int, interface: str) -> None:
    """Let a network interface of the namespace of this socket work; netdevice(7)."""
    request = struct.pack("16sh22x", interface.encode(), _IFF_UP)
    fcntl.ioctl(fd, _SIOCSIFFLAGS, request)


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    given = (os.fsencode(each) if each else None for each in (source, target, kind))
    code = _libc.mount(*given, ctypes.c_ulong(flags), data.encode() or None)
    _check(code, f"mount {kind} on {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    number = _PIVOT_ROOT[platform.machine()]
    _syscall(number, "pivot_root", os.fsencode(new), os.fsencode(old))


def sethostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def clone_tree(path: str) -> int:
    """A descriptor of a copy of what is mounted at a path, with all below, at no place yet."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return _syscall(_OPEN_TREE, f"open_tree {path}", _AT_FDCWD, os.fsencode(path), flags)


def make_read_only(tree: int, *, has_devices: bool) -> None:
    flags = _ATTR_RDONLY | _ATTR_NOSUID | (0 if has_devices else _ATTR_NODEV)
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    at = _AT_EMPTY_PATH | _AT_RECURSIVE
    _syscall(_MOUNT_SETATTR, "mount_setattr", tree, b"", at, attributes, len(attributes))


def move_mount(tree: int, target: str) -> None:
    name = f"move_mount {target}"
    _syscall(_MOVE_MOUNT, name, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_EMPTY_PATH)


def open_beneath(folder: int, path: str, flags: int, mode: int = 0) -> int:
    """Open what is below a folder, and is reached through no link."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)
    return _syscall(_OPENAT2, f"open {path}", folder, os.fsencode(path), how, len(how))


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_bounding_set() -> None:
    """What this process will execute never gains a capability. Needs the capability to do so."""
    for number in range(_CAPABILITIES):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            if number == 0:
                _check(-1, "prctl PR_CAPBSET_DROP")
            return


def drop_capabilities() -> None:
    header, sets = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _syscall(_CAPSET[platform.machine()], "capset", header, sets)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def load_filter(program: bytes) -> None:
    """Let seccomp run this program before each system call from now on."""
    buffer = ctypes.create_string_buffer(program, len(program))
    given = _Program(len(program) // 8, ctypes.addressof(buffer))
    code = _libc.prctl(PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(given), 0, 0)
    _check(code, "prctl PR_SET_SECCOMP")


def landlock_version() -> int:
    """0: there is none."""
    try:
        return _syscall(_LANDLOCK_CREATE, "landlock", 0, 0, _LANDLOCK_VERSION)
    except OSError:
        return 0


def landlock_rules(readable: list[str], writable: list[str]) -> int:
    """A descriptor of rules: these paths alone, no TCP, no signals and abstract sockets of others,
    as far as this kernel's Landlock can.
    """
    version = landlock_version()
    rights = _RIGHTS.get(version, _RIGHTS[3] | (1 << 15 if version >= 5 else 0))
    tcp, scoped = 3 if version >= 4 else 0, 3 if version >= 6 else 0
    sizes = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16}
    handled = struct.pack("=QQQ", rights, tcp, scoped)[: sizes.get(version, 24)]
    rules = _syscall(_LANDLOCK_CREATE, "landlock_create_ruleset", handled, len(handled), 0)
    for path, wanted in [(p, _READ) for p in readable] + [(p, rights) for p in writable]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # hosts differ in what they have
        allowed = wanted & rights
        if not os.path.isdir(path):
            allowed &= _OF_A_FILE
        _syscall(_LANDLOCK_ADD, f"landlock {path}", rules, 1, struct.pack("=Qi", allowed, fd), 0)
        os.close(fd)
    return rules


def landlock_restrict(rules: int) -> None:
    _syscall(_LANDLOCK_RESTRICT, "landlock_restrict_self", rules, 0)
