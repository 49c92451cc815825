"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two workers share two cores here and in CI: one thread each keeps them from fighting. Set before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared inputs (variable ASTROLABE_SHARED, default ../shared); skips with the reason where absent."""
    folder = Path(os.environ.get("ASTROLABE_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no shared inputs at {folder}: set ASTROLABE_SHARED to the folder that holds data/")
    return folder
