"""What made a record: the commit of the checkout and the versions of the packages that decide a result."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "astrolabe-agents",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "langgraph",
    "openai",
    "pydantic",
    "renderers",
    "tokenizers",
    "numpy",
)


@cache
def code_commit() -> str | None:
    """The commit of the checkout that this code lies in, or None where it was installed without one.

    `ASTROLABE_COMMIT` names it where there is no checkout, as in an image that was built from one.
    """
    if named := os.environ.get("ASTROLABE_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed: a repository further up is somebody else's
        return None
    try:
        done = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def versions() -> dict[str, str]:
    """Python's and the packages' versions, by name; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
