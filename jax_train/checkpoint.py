"""Checkpoints that a run resumes from exactly: Orbax v1, one folder per step.

A checkpoint holds the train state, the Grain iterator's place (where there is one), and one JSON object: the data's
fingerprint and what the phase needs beside the state (weight version, consumed ids, the filler's buffer, seeds, best
validation). It appears whole or not at all; what a killed process left half-written is ignored and removed. Restoring
onto another mesh lays the arrays out anew.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Protocol

import jax
from orbax.checkpoint import v1 as ocp

from astrolabe.model.safetensors_io import storage_guard
from astrolabe.records.errors import RunError
from jax_train.step import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports each save at length


class Holder(Protocol):
    """Whoever owns the train state: it is read when saving and set when restoring."""

    state: TrainState


class Checkpoints:
    """The checkpoints of one run, under `folder`."""

    def __init__(self, folder: Path, holder: Holder, *, fingerprint: str, keep: int = 2, data: Any = None) -> None:
        """fingerprint: hash of the data; a checkpoint of other data is refused. keep: how many of the newest stay.
        data: a Grain iterator, whose place is saved and set."""
        self._holder, self._fingerprint, self._data = holder, fingerprint, data
        folder.mkdir(parents=True, exist_ok=True)
        self._inner = ocp.training.Checkpointer(
            folder.resolve(),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Write checkpoint `step`; returns once it is whole on disk. `extra` is plain JSON. RunError if the disk is full."""
        text = json.dumps({"fingerprint": self._fingerprint, "extra": extra}, ensure_ascii=False)
        parts: dict[str, Any] = {"state": self._holder.state, "meta": {"json": text}}
        if self._data is not None:
            parts["data"] = self._data
        with storage_guard(Path(self._inner.directory)):
            self._inner.save_checkpointables(step, parts)

    def restore(self) -> tuple[int, dict[str, Any]] | None:
        """(step, extra) of the newest checkpoint, the holder's state and the iterator put back; None if there is none.

        RunError if it was made with other data.
        """
        latest = self._inner.latest
        if latest is None:
            return None
        meta = self._inner.load_checkpointables(latest.step, {"meta": None})["meta"]
        saved = json.loads(meta["json"])
        if saved["fingerprint"] != self._fingerprint:
            raise RunError(
                f"checkpoint {latest.step} in {self._inner.directory} was made with other data",
                "give the data of that run to continue it, or another out folder",
            )
        wanted: dict[str, Any] = {"state": jax.tree.map(_abstract, self._holder.state)}
        if self._data is not None:
            wanted["data"] = self._data
        self._holder.state = self._inner.load_checkpointables(latest.step, wanted)["state"]
        return latest.step, saved["extra"]

    def close(self) -> None:
        self._inner.close()


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
