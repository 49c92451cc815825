"""Dense attention: causal within a segment, grouped queries, finite masking.

Scores and softmax are float32. The mask value is finite, and padded queries (segment 0) attend to the padding before
them and to themselves, so that no row of the softmax is empty. Queries are taken in blocks, each against the keys
up to its own end only: the upper triangle of blocks is never computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from astrolabe.model.sharding import has_mesh, spec

MASKED = -1e30
"""Score of a masked key: finite, and below any real score in float32."""

QUERY_BLOCK = 128


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B,T,N,G,K] (N key-value heads, G queries each), k and v [B,S,N,K], mask [B,T,S] (True: seen) -> [B,T,N,G,K]."""
    scores = jnp.einsum(
        "btngk,bsnk->bngts",
        q,
        k,
        preferred_element_type=jnp.float32,
        out_sharding=spec("batch", "kv_heads", "group", "length", "keys"),
    )
    scores = jnp.where(mask[:, None, None], scores * q.shape[-1] ** -0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum(
        "bngts,bsnk->btngk", weights, v, out_sharding=spec("batch", "length", "kv_heads", "group", "head_dim")
    )


def packed_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Attention inside packed rows. q [B,T,N,G,K], k and v [B,T,N,K], segment_ids [B,T] int32 (0: padding)."""
    length = q.shape[1]
    order = jnp.arange(length)
    # A row split over `context` cannot be cut into blocks without moving queries between devices.
    block = length if has_mesh() else QUERY_BLOCK
    out = []
    for start in range(0, length, block):
        end = min(start + block, length)
        same = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
        seen = same & (order[start:end, None] >= order[None, :end])
        out.append(attend(q[:, start:end], k[:, :end], v[:, :end], seen))
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of new tokens over a cache. q [B,T,N,G,K], k and v [B,S,N,K] with key s at position s, positions [B,T]."""
    seen = jnp.arange(k.shape[1])[None, None, :] <= positions[:, :, None]
    return attend(q, k, v, seen)
