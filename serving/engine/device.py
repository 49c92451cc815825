"""What the engine runs on the device: prefill a few rows, decode several tokens for all rows, copy a prefix.

Three jitted functions over one donated cache, shared by all engines of a process. Shapes come from small sets (rows,
chunk length, cache length), so that few programs are compiled. Keys are kept with their positions last and values with
their positions before the head's width, so that scores and outputs are both plain matrix products over the cache as it
lies (on a CPU scores take less than half the time that keys laid out like values need). The layers are the trainer's own; only where keys
and values are kept differs.

A row's randomness is one uniform number per position, given by the caller, and its log-probs are those of the whole
distribution after temperature: neither depends on what else is in the batch.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from astrolabe.model.attention import MASKED
from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import Decoder, Params, head_weights, rms_norm, rope_tables

SlotCache = tuple[tuple[jax.Array, jax.Array], ...]
"""Per layer, keys [slots, kv heads, head dim, length] and values [slots, kv heads, length, head dim]."""

INTS = ("slot", "last", "position", "remaining", "top_k", "active")
"""Columns of a decode table [B, 6] int32. `last` is the newest id, not yet in the cache, which stands at `position`."""
FLOATS = ("temperature", "top_p")
"""Columns [B, 2] float32."""
_BLOCK = 64


class Chunk(NamedTuple):
    """What a decode chunk sampled: `counts[b]` ids of row b, in order."""

    tokens: jax.Array
    """[B, steps] int32."""
    logprobs: jax.Array
    """[B, steps] float32, after temperature."""
    counts: jax.Array
    """[B] int32."""


def empty_cache(config: ModelConfig, slots: int, length: int, dtype: Any) -> SlotCache:
    heads, k = config.num_kv_heads, config.head_dim
    return tuple(
        (jnp.zeros((slots, heads, k, length), dtype), jnp.zeros((slots, heads, length, k), dtype))
        for _ in range(config.num_layers)
    )


def cache_length(cache: SlotCache) -> int:
    """Positions that a slot has room for."""
    return cache[0][1].shape[2]


@partial(jax.jit, static_argnames=("length",))
def grow_cache(cache: SlotCache, *, length: int) -> SlotCache:
    """The cache with room for `length` positions."""
    more = (0, length - cache_length(cache))
    still = (0, 0)
    return tuple((jnp.pad(k, (still, still, still, more)), jnp.pad(v, (still, still, more, still))) for k, v in cache)


@partial(jax.jit, donate_argnames=("cache",))
def copy_prefix(cache: SlotCache, source: jax.Array, target: jax.Array) -> SlotCache:
    """Slot `source`'s keys and values into slot `target` (int32 scalars)."""
    return jax.tree.map(lambda c: c.at[target].set(c[source]), cache)


@partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def prefill(params: Params, cache: SlotCache, table: jax.Array, ids: jax.Array, *, config: ModelConfig) -> SlotCache:
    """Write prompt chunks into the cache. table [B, 3] int32: slot, first position, number of ids; ids [B, T] int32.

    The slots of a call are all different; a row of no ids writes nothing.
    """
    slots, starts, lengths = table[:, 0], table[:, 1], table[:, 2]
    offsets = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return _forward(params, config, cache, slots, ids, starts[:, None] + offsets, offsets < lengths[:, None])[1]


@partial(jax.jit, static_argnames=("config", "all_slots", "truncated"), donate_argnames=("cache",))
def decode_chunk(
    params: Params,
    cache: SlotCache,
    ints: jax.Array,
    floats: jax.Array,
    stops: jax.Array,
    uniforms: jax.Array,
    *,
    config: ModelConfig,
    all_slots: bool,
    truncated: bool,
) -> tuple[SlotCache, Chunk]:
    """Up to `steps` tokens for each active row, until it samples one of its stop ids or nothing remains.

    ints [B, 6] and floats [B, 2]: columns `INTS` and `FLOATS`; stops [B, K] int32, padded with -1; uniforms
    [B, steps] float32 in [0, 1): the number that decides the token at each step. `all_slots`: row b is slot b, for all.
    `truncated`: whether any row has a top-p or a top-k.
    """
    slots, last, position, remaining, top_k, active = (ints[:, i] for i in range(len(INTS)))
    temperature, top_p = floats[:, 0], floats[:, 1]
    head = head_weights(params)
    rows, steps = uniforms.shape

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        at, cache, last, position, remaining, active, tokens, logprobs = carry
        where = None if all_slots else slots
        x, cache = _forward(params, config, cache, where, last[:, None], position[:, None], active[:, None])
        logits = jnp.einsum("bd,vd->bv", x[:, 0], head.astype(x.dtype), preferred_element_type=jnp.float32)
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        allowed = _truncate(scaled, top_p, top_k) if truncated else scaled
        token = jnp.where(temperature > 0, _pick(allowed, uniforms[:, at]), jnp.argmax(scaled, axis=-1))
        token = token.astype(jnp.int32)
        chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
        tokens = tokens.at[:, at].set(jnp.where(active, token, -1))
        logprobs = logprobs.at[:, at].set(chosen - jax.nn.logsumexp(scaled, axis=-1))
        remaining = remaining - active
        done = jnp.any(token[:, None] == stops, axis=1) | (remaining <= 0)
        last = jnp.where(active, token, last)
        return at + 1, cache, last, position + active, remaining, active & ~done, tokens, logprobs

    tokens = jnp.full((rows, steps), -1, jnp.int32)
    carry = (jnp.int32(0), cache, last, position, remaining, active > 0, tokens, jnp.zeros((rows, steps), jnp.float32))
    out = lax.while_loop(lambda c: (c[0] < steps) & jnp.any(c[5]), step, carry)
    return out[1], Chunk(out[6], out[7], jnp.sum(out[6] >= 0, axis=1))


@functools.lru_cache(maxsize=16)
def _skeleton(config: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config)))


def _forward(
    params: Params,
    config: ModelConfig,
    cache: SlotCache,
    slots: jax.Array | None,
    ids: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, SlotCache]:
    """Hidden states [B,T,D] of new ids [B,T] after the final norm, and the cache with them in it.

    slots [B], or None where row b is slot b. Padding (not `valid`) is written nowhere, and its output means nothing.
    """
    graphdef, abstract = _skeleton(config)
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    model: Decoder = nnx.merge(graphdef, state)
    x = model.lookup(ids)
    cos, sin = rope_tables(config, positions)
    layer_def, stacked = nnx.split(model.layers)
    rows = jnp.arange(ids.shape[0]) if slots is None else slots
    length = cache_length(cache)
    places = jnp.where(valid, positions, length)  # an index past the end is dropped by the scatter
    kept: list[tuple[jax.Array, jax.Array]] = []
    for index, (keys, values) in enumerate(cache):

        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array = keys, values: jax.Array = values
        ) -> jax.Array:
            keys = keys.at[rows[:, None], :, :, places].set(k.astype(keys.dtype), mode="drop")
            values = values.at[rows[:, None], :, places].set(v.astype(values.dtype), mode="drop")
            kept.append((keys, values))
            seen = (keys, values) if slots is None else (keys[slots], values[slots])
            return _attend(q, *seen, positions)

        x = nnx.merge(layer_def, jax.tree.map(lambda w, i=index: w[i], stacked))(x, cos, sin, attention)
    return rms_norm(x, model.norm[...], config.rms_norm_eps), tuple(kept)


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """q [B,T,N,G,K] over keys [B,N,K,S] and values [B,N,S,K]; one at position p sees places 0..p -> [B,T,N,G,K]."""
    b, t, n, g, k = q.shape
    flat = q.transpose(0, 2, 1, 3, 4).reshape(b, n, t * g, k)
    scores = jnp.einsum("bnqk,bnks->bnqs", flat, keys.astype(q.dtype), preferred_element_type=jnp.float32)
    seen = jnp.arange(keys.shape[3])[None, None] <= positions[:, :, None]
    mask = jnp.broadcast_to(seen[:, :, None], (b, t, g, keys.shape[3])).reshape(b, 1, t * g, -1)
    weights = jax.nn.softmax(jnp.where(mask, scores * k**-0.5, MASKED), axis=-1).astype(q.dtype)
    out = jnp.einsum("bnqs,bnsk->bnqk", weights, values.astype(q.dtype))
    return out.reshape(b, n, t, g, k).transpose(0, 2, 1, 3, 4)


def _pick(scaled: jax.Array, uniform: jax.Array) -> jax.Array:
    """Sample from softmax(scaled [B,V]) by inverting its distribution at uniform [B]: first by block, then inside."""
    rows, size = scaled.shape
    weights = jnp.exp(scaled - jnp.max(scaled, axis=1, keepdims=True))
    blocks = jnp.pad(weights, ((0, 0), (0, -size % _BLOCK))).reshape(rows, -1, _BLOCK)
    upto = jnp.cumsum(jnp.sum(blocks, axis=2), axis=1)
    total = upto[:, -1]
    target = jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
    block = jnp.sum(upto <= target[:, None], axis=1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    before = jnp.where(block > 0, jnp.take_along_axis(upto, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    within = jnp.cumsum(inside, axis=1)
    # Rounding may leave the target past the block's own sum: then it is the block's last id that has any weight.
    last = _BLOCK - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=1)
    offset = jnp.minimum(jnp.sum(within <= (target - before)[:, None], axis=1), last)
    return block * _BLOCK + offset


def _truncate(scaled: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Logits [B, V] with what top-k and top-p leave out at -inf; the most likely token always stays."""
    size = scaled.shape[1]
    order = jnp.argsort(-scaled, axis=1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=1)
    weights = jax.nn.softmax(ranked, axis=1)
    before = jnp.cumsum(weights, axis=1) - weights
    keep = (before < top_p[:, None]) & (jnp.arange(size)[None] < jnp.where(top_k > 0, top_k, size)[:, None])
    keep = keep.at[:, 0].set(True)
    place = jnp.argsort(order, axis=1)
    return jnp.where(jnp.take_along_axis(keep, place, axis=1), scaled, -jnp.inf)
