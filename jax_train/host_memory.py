"""Freed host memory stays with the process, where JAX computes on the CPU.

XLA frees the temporaries of a step at its end. By default glibc gives large ones back to the kernel, so every step
faults its pages in anew: a fifth of the CPU time of a small model (`docs/performance.md`).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc to use one arena, to map no block apart, and to return nothing below 2 GiB; whether it was done.

    To be called before JAX starts its threads, which keep the arenas that they have. Not done where an accelerator's
    plugin is installed: there the host's memory is for loading, by many threads."""
    if sys.platform != "linux" or _accelerator():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(M_ARENA_MAX, 1) and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def _accelerator() -> bool:
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or importlib.util.find_spec("libtpu") is not None
