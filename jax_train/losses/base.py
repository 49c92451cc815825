"""What losses share: their type, and sums over the segments of a packed row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from astrolabe.model.sharding import spec
from jax_train.packing import PackedBatch

Metrics = dict[str, tuple[jax.Array, jax.Array]]
"""name -> (sum, count), both float32 scalars; the mean is taken once per step."""
LossOutput = tuple[jax.Array, jax.Array, Metrics]
Loss = Callable[[jax.Array, jax.Array, PackedBatch], LossOutput]
"""(logp [rows, budget], entropy [rows, budget], batch) -> (sum, denominator, metrics). Both are 0 where mask is 0."""


def segment_matrix(batch: PackedBatch, segments: int) -> jax.Array:
    """Membership [rows, budget, segments] float32: 1 where the token belongs to segment s+1 of its row."""
    ids = jnp.arange(1, segments + 1)
    return (batch.segment_ids[..., None] == ids).astype(jnp.float32)


def segment_sums(values: jax.Array, members: jax.Array) -> jax.Array:
    """Sums of values [rows, budget] per segment: [rows, segments]."""
    return jnp.einsum("bt,bts->bs", values, members, out_sharding=spec("batch", None))


def per_token(values: jax.Array, members: jax.Array) -> jax.Array:
    """Each token's segment's value: [rows, segments] -> [rows, budget], 0 at padding."""
    return jnp.einsum("bs,bts->bt", values, members, out_sharding=spec("batch", "length"))


def safe_divide(top: Any, bottom: Any) -> jax.Array:
    """top / bottom, and 0 with a zero gradient where bottom is 0."""
    return jnp.where(bottom == 0, 0.0, top / jnp.where(bottom == 0, 1.0, bottom))
