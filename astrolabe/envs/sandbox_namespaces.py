"""User, mount, PID, network, IPC and UTS namespaces with an empty, read-only root, made by the zygote itself.

After this there is no file, no /proc, no network interface and no other process to be seen. Standard library only:
this file is loaded by path inside the zygote.
"""

from __future__ import annotations

import ctypes
import os
import platform

_FLAGS = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # USER NS PID NET IPC UTS
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 32, 0x4000, 0x40000
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


class NamespaceError(OSError):
    """A step that this machine does not allow."""


def _check(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise NamespaceError(number, f"{step}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def enter(libc: ctypes.CDLL) -> None:
    """Enter the namespaces and an empty root. The next fork is PID 1. Raises NamespaceError or OSError where a step is
    refused; the process may then be half way in and should not go on."""
    if platform.machine() not in _PIVOT_ROOT:
        raise NamespaceError(0, f"pivot_root: no number for {platform.machine()}")
    uid, gid = os.getuid(), os.getgid()
    _check(libc.unshare(_FLAGS), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"65534 {uid} 1")
    _write("/proc/self/gid_map", f"65534 {gid} 1")
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount private")
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _check(libc.mount(b"none", b"/tmp", b"tmpfs", flags, b"size=4k,mode=0500"), "mount tmpfs")
    os.chdir("/tmp")
    _check(libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(libc.umount2(b".", _MNT_DETACH), "umount")
    remount = ctypes.c_ulong(_MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _check(libc.mount(None, b"/", None, remount, None), "remount")
