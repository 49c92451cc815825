"""The mesh of a run, and batches put on it.

Axes `data`, `fsdp`, `tensor`, `context`, always all four, typed Explicit: a sharding is part of an array's type, and a
mistake is an error while tracing. One device needs no mesh. On several hosts every process reads the same batch and
puts its own part on its devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from astrolabe.model.config import ModelConfig
from astrolabe.model.sharding import MESH_AXES, named
from astrolabe.records.errors import UsageError


def mesh_sizes(sizes: dict[str, int], devices: int) -> dict[str, int]:
    """Sizes per axis with one -1 (the rest of the devices) filled in. UsageError where they do not fit the devices."""
    out = {axis: sizes.get(axis, 1) for axis in MESH_AXES}
    free = [axis for axis, size in out.items() if size == -1]
    fixed = int(np.prod([size for size in out.values() if size != -1]))
    if len(free) > 1 or fixed < 1 or devices % fixed or (not free and fixed != devices):
        text = ", ".join(f"{axis}={size}" for axis, size in out.items())
        raise UsageError(
            f"a mesh of {text} does not fit {devices} devices", "change the mesh section; one size may be -1"
        )
    for axis in free:
        out[axis] = devices // fixed
    return out


def make_mesh(sizes: dict[str, int]) -> Mesh | None:
    """The mesh over all devices, or None where there is one device."""
    if jax.device_count() == 1 and all(size in (1, -1) for size in sizes.values()):
        return None
    full = mesh_sizes(sizes, jax.device_count())
    return jax.make_mesh(tuple(full.values()), tuple(full))


def check_mesh(mesh: Mesh | None, config: ModelConfig, rows: int, budget: int) -> None:
    """UsageError unless heads, sizes, rows and columns divide over the mesh."""
    if mesh is None:
        return
    size = dict(mesh.shape)
    for what, number, axes in (
        ("key-value heads", config.num_kv_heads, ("tensor",)),
        ("vocabulary", config.vocab_size, ("tensor",)),
        ("mlp size", config.intermediate_size, ("tensor",)),
        ("hidden size", config.hidden_size, ("fsdp",)),
        ("batch.rows", rows, ("data", "fsdp")),
        ("batch.budget", budget, ("context",)),
    ):
        parts = int(np.prod([size[axis] for axis in axes]))
        if number % parts:
            raise UsageError(
                f"{what} ({number}) does not divide over {' x '.join(axes)} ({parts})", "change the mesh section"
            )


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Set the mesh, if there is one."""
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        yield


def put_batch(batch: Any, mesh: Mesh | None) -> Any:
    """Host arrays [micro, rows, budget] (or [rows, budget]) as device arrays, rows and columns split over the mesh."""
    if mesh is None:
        return jax.tree.map(jax.device_put, batch)

    def put(array: np.ndarray) -> jax.Array:
        axes = (*(None,) * (array.ndim - 2), "batch", "length")
        return jax.make_array_from_callback(array.shape, named(mesh, axes), lambda index: array[index])

    return jax.tree.map(put, batch)
