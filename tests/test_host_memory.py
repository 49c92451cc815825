"""Memory that a step freed is used again by the next, not faulted in anew."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

PROGRAM = """
import resource
import numpy as np
from jax_train.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.ones(16 * 2**20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before, done = faults(), keep_freed_memory()
faults()
print(done, before, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="memory of the host only")
def test_freed_blocks_are_used_again():
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    if out[0] != "True":
        pytest.skip("a C library without mallopt")
    assert int(out[2]) < int(out[1]) / 4, out
