"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before JAX is imported. The tests compile much and compute little: without the expensive passes of the compiler they
# take a third of the time.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared inputs (variable ASTROLABE_SHARED, default ../shared); skips with the reason where absent."""
    folder = Path(os.environ.get("ASTROLABE_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no shared inputs at {folder}: set ASTROLABE_SHARED to the folder that holds data/")
    return folder
