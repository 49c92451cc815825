"""Bytes that outlive a kill: whole files by rename, appended files with their data on disk before anyone counts on it.

A full disk is the user's to mend, so it becomes an error with a mend; every other OSError stays what it is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from astrolabe.records.errors import RunError

TEMPORARY = ".tmp~"
"""Suffix of a file that is not complete yet. Only the holder of a run's lock writes in it, so leftovers are a killed
process's and may be removed."""

GO_ON = "free some space, then run the same command again: it goes on where it stopped"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def disk_guard(path: Path, mend: str = GO_ON) -> Iterator[None]:
    """Turns "no space left", "quota exceeded" and "file too large" into a RunError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise RunError(f"{path}: cannot write: {os.strerror(error.errno)}", mend) from error


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Writes the whole file or nothing. With `sync`, it is on the disk on return."""
    temporary = path.with_name(path.name + TEMPORARY)
    with disk_guard(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append(path: Path, data: bytes, *, at: int) -> None:
    """Writes `data` at byte `at` and makes it the end of the file, on the disk on return.

    What a killed process left beyond `at` is cut off. If the disk is full the file is cut back to `at`.
    """
    with disk_guard(path), open(path, "r+b" if path.exists() else "w+b", buffering=0) as file:
        file.truncate(at)
        file.seek(at)
        try:
            view = memoryview(data)
            while view:  # a raw write may be short, first of all on a disk that is about to be full
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(at)
            raise


def remove_temporary(folder: Path) -> None:
    """Removes what killed writers left unfinished under `folder`."""
    for path in folder.rglob("*" + TEMPORARY):
        path.unlink(missing_ok=True)
