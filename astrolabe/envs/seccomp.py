"""An allow-list seccomp filter in raw BPF: the few system calls that a computation needs; the rest fail with EPERM.

Everything that a tool may import is loaded before the filter is set, so no call that opens, creates, connects, forks,
execs, signals or traces is on the list. A process of a foreign architecture is killed. Standard library only: this
file is loaded by path inside the zygote.
"""

from __future__ import annotations

import ctypes
import platform
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
RET_KILL_PROCESS, RET_ERRNO_EPERM, RET_ALLOW = 0x80000000, 0x00050001, 0x7FFF0000
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06

# Numbers from the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_X86_64 = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25, "madvise": 28,
    "nanosleep": 35, "getpid": 39, "exit": 60, "gettimeofday": 96, "getrusage": 98, "sigaltstack": 131,
    "gettid": 186, "time": 201, "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "set_robust_list": 273, "getrandom": 318, "membarrier": 324, "rseq": 334,
}  # fmt: skip
_AARCH64 = {
    "read": 63, "write": 64, "close": 57, "fstat": 80, "lseek": 62, "mmap": 222, "mprotect": 226, "munmap": 215,
    "brk": 214, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "sched_yield": 124, "mremap": 216,
    "madvise": 233, "nanosleep": 101, "getpid": 172, "exit": 93, "gettimeofday": 169, "getrusage": 165,
    "sigaltstack": 132, "gettid": 178, "futex": 98, "restart_syscall": 128, "clock_gettime": 113, "clock_getres": 114,
    "clock_nanosleep": 115, "exit_group": 94, "set_robust_list": 99, "getrandom": 278, "membarrier": 283, "rseq": 293,
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def program(machine: str | None = None) -> bytes | None:
    """The BPF program for `machine` (default: this one), or None for an architecture without a table."""
    known = _ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    audit, table = known
    numbers = sorted(table.values())
    code = [
        _instruction(_LOAD, 4),  # seccomp_data.arch
        _instruction(_JUMP_EQUAL, audit, 1, 0),
        _instruction(_RETURN, RET_KILL_PROCESS),
        _instruction(_LOAD, 0),  # seccomp_data.nr; x32 numbers have bit 30 set and so equal none of the list
    ]
    for i, number in enumerate(numbers):
        code.append(_instruction(_JUMP_EQUAL, number, len(numbers) - i, 0))
    return b"".join([*code, _instruction(_RETURN, RET_ERRNO_EPERM), _instruction(_RETURN, RET_ALLOW)])


class Filter:
    """The filter, with its memory laid out before the fork so that a child only makes two prctl calls."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._libc = libc
        code = program()
        self.available = code is not None
        if code is not None:
            self._code = ctypes.create_string_buffer(code, len(code))
            self._fprog = ctypes.create_string_buffer(
                struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(self._code))
            )

    def install(self) -> bool:
        """Set no_new_privs and the filter on the calling process; False if the kernel refuses. It cannot be undone."""
        if not self.available or self._libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        address = ctypes.c_void_p(ctypes.addressof(self._fprog))
        return self._libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address, 0, 0) == 0
