"""Token arrays of rollouts in a tensorstore (Zarr) beside the run's JSON: one long axis, traces one after another.

Four arrays of equal length: tokens int32, mask int8, logprobs float32 (NaN where mask is 0), versions int32 (the weight
version that sampled the token, -1 where none did). A trace is a range [start, start + length).

The length that counts is the one in the run's journal: what a killed process appended after its last commit is
blanked and cut off when the store is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from astrolabe.records.durable import disk_guard
from astrolabe.records.errors import RunError

CHUNK = 16384
_RESTORE = "restore the folder, or roll out into a new run"
_ARRAYS: dict[str, tuple[str, Any]] = {
    "tokens": ("<i4", 0),
    "mask": ("|i1", 0),
    "logprobs": ("<f4", "NaN"),
    "versions": ("<i4", -1),
}


class TokenRange(NamedTuple):
    """The four arrays of one trace, each [length]."""

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


class TokenStore:
    """The arrays under `path` (a run's `tokens` folder). `length` cuts them back to what was committed.

    RunError if the arrays are missing or broken, or hold less than `length`."""

    def __init__(self, path: Path, *, length: int | None = None, read_only: bool = False) -> None:
        self.path = path
        self._arrays: dict[str, ts.TensorStore] = {}
        if not read_only:
            for lock in path.rglob("*.__lock"):  # a killed process's; the run's own lock keeps other writers out
                lock.unlink(missing_ok=True)
        for name, (dtype, fill) in _ARRAYS.items():
            spec: dict[str, Any] = {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": str((path / name).resolve())},
            }
            if not read_only:
                spec["metadata"] = {
                    "dtype": dtype,
                    "fill_value": fill,
                    "shape": [0],
                    "chunks": [CHUNK],
                    "compressor": {"id": "zstd", "level": 1},
                }
                if (path / name / ".zarray").exists():
                    del spec["metadata"]["shape"]
            try:
                with disk_guard(path):
                    self._arrays[name] = ts.open(
                        spec, open=True, create=not read_only, read=True, write=not read_only
                    ).result()
            except ValueError as error:
                raise RunError(f"{path / name}: no token array: {_first_clause(error)}", _RESTORE) from error
        shortest = min(array.shape[0] for array in self._arrays.values())
        self.length = shortest if length is None else length
        if self.length > shortest:
            raise RunError(f"{path}: the journal counts {self.length} tokens, the arrays hold {shortest}", _RESTORE)
        if not read_only:
            self.truncate(self.length)

    def truncate(self, length: int) -> None:
        """Forgets everything from `length` on."""
        with disk_guard(self.path):
            for name, array in self._arrays.items():
                end = array.shape[0]
                if end > length:
                    # Blanked first: a chunk that is only partly cut off keeps its bytes, and equal runs have equal files.
                    border = min(end, -(-length // CHUNK) * CHUNK)
                    if border > length:
                        array[length:border].write(np.asarray(array.fill_value)).result()
                    self._arrays[name] = array.resize(exclusive_max=[length]).result()
        self.length = length

    def append(
        self, tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> int:
        """Appends one trace (four sequences of equal length) and returns its start. ValueError if lengths differ or a
        token of the policy (mask 1) has no finite log-probability."""
        columns: dict[str, np.ndarray] = {
            "tokens": np.asarray(tokens, np.int32),
            "mask": np.asarray(mask, np.int8),
            "logprobs": np.asarray(logprobs, np.float32),
            "versions": np.asarray(versions, np.int32),
        }
        if len({column.shape for column in columns.values()}) != 1 or columns["tokens"].ndim != 1:
            raise ValueError(f"arrays of one trace differ in length: { {k: v.shape for k, v in columns.items()} }")
        sampled = columns["mask"] != 0
        if not np.isfinite(columns["logprobs"][sampled]).all():
            raise ValueError("a sampled token has no finite log-probability")
        columns["logprobs"] = np.where(sampled, columns["logprobs"], np.float32("nan"))
        start, end = self.length, self.length + len(columns["tokens"])
        with disk_guard(self.path):
            for name, column in columns.items():
                grown = self._arrays[name].resize(exclusive_max=[end]).result()
                grown[start:end].write(column).result()
                self._arrays[name] = grown
        self.length = end
        return start

    def read(self, start: int, length: int) -> TokenRange:
        """The arrays of the trace at [start, start + length). RunError if that is not within the store."""
        if not 0 <= start <= start + length <= self.length:
            raise RunError(
                f"{self.path}: the trace [{start}, {start + length}) is not within its {self.length} tokens",
                "give the rows with the tokens folder of their own run",
            )
        try:
            futures = [self._arrays[name][start : start + length].read() for name in _ARRAYS]
            return TokenRange(*(np.asarray(future.result()) for future in futures))
        except ValueError as error:
            raise RunError(f"{self.path}: cannot be read: {_first_clause(error)}", _RESTORE) from error


def _first_clause(error: Exception) -> str:
    """What tensorstore says before it quotes its own source and the whole specification."""
    return str(error).split(" [")[0]
