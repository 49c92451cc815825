"""Dense attention: causal within a segment, grouped queries, finite masking.

Scores and softmax are float32. The mask value is finite, and padded queries (segment 0) attend to the padding before
them and to themselves, so that no row of the softmax is empty. Queries are taken in blocks, each against the keys up
to its own end only (the upper triangle of blocks is never computed), and each block's scores are computed again in the
backward pass instead of kept. Queries of a group are folded into the rows of one matrix product, which on a CPU is
several times faster than the product with the group as an axis of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from astrolabe.model.sharding import has_mesh, reshard, spec

MASKED = -1e30
"""Score of a masked key: finite, and below any real score in float32."""

QUERY_BLOCK = 128


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B,T,N,G,K] (N key-value heads, G queries each), k and v [B,S,N,K], mask [B,T,S] (True: seen) -> [B,T,N,G,K]."""
    b, t, n, g, d = q.shape
    by_head = spec("batch", "kv_heads", "length", None)
    folded = (q * d**-0.5).transpose(0, 2, 1, 3, 4).reshape(b, n, t * g, d, out_sharding=by_head)
    scores = jnp.einsum("bnmk,bnks->bnms", folded, k.transpose(0, 2, 3, 1), preferred_element_type=jnp.float32)
    scores = scores.reshape(b, n, t, g, -1, out_sharding=spec("batch", "kv_heads", "length", None, None))
    scores = jnp.where(mask[:, None, :, None, :], scores, MASKED)
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(v.dtype).reshape(b, n, t * g, -1, out_sharding=by_head)
    out = jnp.einsum("bnms,bnsk->bnmk", weights, v.transpose(0, 2, 1, 3), preferred_element_type=jnp.float32)
    out = out.reshape(b, n, t, g, d, out_sharding=spec("batch", "kv_heads", "length", None, None)) / total
    return out.astype(v.dtype).transpose(0, 2, 1, 3, 4)


def packed_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Attention inside packed rows. q [B,T,N,G,K], k and v [B,T,N,K], segment_ids [B,T] int32 (0: padding)."""
    length = q.shape[1]
    # A row split over `context` cannot be cut into blocks without moving queries between devices.
    block = length if has_mesh() else QUERY_BLOCK
    k, v = (reshard(x, "batch", "keys", "kv_heads", "head_dim") for x in (k, v))
    key_segments = reshard(segment_ids, "batch", "keys")
    order = jnp.arange(length)
    block_attend = jax.checkpoint(attend)
    out = []
    for start in range(0, length, block):
        end = min(start + block, length)
        same = segment_ids[:, start:end, None] == key_segments[:, None, :end]
        seen = same & (order[start:end, None] >= order[None, :end])
        out.append(block_attend(q[:, start:end], k[:, :end], v[:, :end], seen))
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of new tokens over a cache. q [B,T,N,G,K], k and v [B,S,N,K] with key s at position s, positions [B,T]."""
    seen = jnp.arange(k.shape[1])[None, None, :] <= positions[:, :, None]
    return attend(q, k, v, seen)
