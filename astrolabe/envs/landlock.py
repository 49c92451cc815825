"""Landlock by raw system calls: from here on this process and its children reach no file, no TCP port, no signal
outside their domain. Needs no privilege. Standard library only: this file is loaded by path inside the zygote.
"""

from __future__ import annotations

import ctypes
import struct

# The numbers are the same on every architecture that has the generic table.
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_PR_SET_NO_NEW_PRIVS = 38


def abi(libc: ctypes.CDLL) -> int:
    """The kernel's landlock ABI, or 0 where there is none."""
    return max(0, libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def _ruleset(version: int) -> bytes:
    """struct landlock_ruleset_attr that handles every right which `version` knows (linux/landlock.h)."""
    files = (1 << 13) - 1  # ABI 1: execute ... make_sym
    if version >= 2:
        files |= 1 << 13  # refer
    if version >= 3:
        files |= 1 << 14  # truncate
    if version >= 5:
        files |= 1 << 15  # ioctl on devices
    if version >= 6:
        return struct.pack("QQQ", files, 0b11, 0b11)  # TCP bind and connect; abstract sockets and signals
    return struct.pack("QQ", files, 0b11) if version >= 4 else struct.pack("Q", files)


def deny_all(libc: ctypes.CDLL) -> int:
    """Deny every handled right, with no rule that grants one. Returns the ABI in force, 0 if the kernel has none."""
    version = abi(libc)
    if not version:
        return 0
    attributes = _ruleset(version)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0 or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return 0
    applied = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    libc.close(ruleset)
    return version if applied else 0
