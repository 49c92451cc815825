"""Freed host memory stays with the process, where JAX computes on the CPU.

XLA frees the temporaries of a step at its end. By default glibc gives large ones back to the kernel, so every step
faults its pages in anew: a fifth of the CPU time of a small model (`docs/performance.md`).
"""

from __future__ import annotations

import ctypes
import sys

import jax

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc to map no block apart and to return nothing below 2 GiB; whether it was done (Linux with glibc, CPU)."""
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
