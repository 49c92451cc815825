"""Logical axes and the rules that map them to the mesh.

Weights and activations name their axes ("embed", "heads", ...). One table maps each name to axes of the mesh
(`data`, `fsdp`, `tensor`, `context`). Without a mesh (one device, no `jax.set_mesh`) every specification is None and
the same code runs unsharded.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor", "context")

RULES: dict[str, str | tuple[str, ...] | None] = {
    # weights
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "norm": None,
    # activations
    "batch": ("data", "fsdp"),
    "length": "context",
    "keys": None,
    "act_embed": None,
    "group": None,
}
"""Logical axis -> mesh axis."""


def partition(*axes: str | None) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes (None: not sharded)."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def has_mesh() -> bool:
    """Whether a mesh is set; read at trace time."""
    return not jax.sharding.get_abstract_mesh().empty


def spec(*axes: str | None) -> PartitionSpec | None:
    """`partition(*axes)` where a mesh is set, else None: the value for `out_sharding=`."""
    return partition(*axes) if has_mesh() else None


def reshard(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x` laid out by logical axes; itself where no mesh is set."""
    return jax.reshard(x, partition(*axes)) if has_mesh() else x


def gathered(w: jax.Array, *axes: str) -> jax.Array:
    """A weight gathered over `fsdp` for use, still split over `tensor`; its gradient is scattered back."""
    return reshard(w, *(None if RULES[axis] == "fsdp" else axis for axis in axes))


def named(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(mesh, partition(*axes))


def tree_shardings(mesh: Mesh, axes_tree: Any) -> Any:
    """NamedShardings for a tree whose leaves are tuples of logical axes."""
    return jax.tree.map(lambda axes: named(mesh, axes), axes_tree, is_leaf=lambda x: isinstance(x, tuple))
