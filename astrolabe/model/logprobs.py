"""Log-probabilities of tokens: the only place that meets the vocabulary.

Hidden states are flattened to tokens and taken in chunks under a scan with rematerialisation, so that no array of
[tokens, vocab] exists, forward or backward. Tokens that are not asked for are sorted to the end, and chunks of them are
skipped. Logits and log-softmax are float32. With a mesh each device works on its own tokens and, over `tensor`, on its
own part of the vocabulary (`shard_map`, with one maximum and sums across).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from astrolabe.model.sharding import has_mesh, partition, reshard


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: float | jax.Array = 1.0,
    chunk: int = 1024,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(hidden @ head.T / temperature)[target], and the entropy of that distribution in nats.

    hidden [..., D], head [V, D], targets [...] int32 with the leading axes of hidden: [N], or [B, T] under a mesh.
    Returns two float32 arrays of targets' shape. The entropy carries no gradient. At most [chunk, V] logits exist at a
    time. Where `mask` (of targets' shape) is 0, both are 0 and nothing is computed. Targets out of range give the
    log-probability of no token: check ids on the host.
    """
    hidden, head, targets = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets)
    mask = jnp.ones_like(targets) if mask is None else jnp.asarray(mask)
    if not has_mesh():
        return _local(hidden, head, targets, mask, temperature, chunk=chunk, axis=None)
    rows = partition("batch", "length")
    fn = jax.shard_map(
        partial(_local, chunk=chunk, axis="tensor"),
        in_specs=(partition("batch", "length", "act_embed"), partition("vocab", None), rows, rows, partition()),
        out_specs=(rows, rows),
    )
    return fn(hidden, reshard(head, "vocab", None), targets, mask, jnp.float32(temperature))


def next_token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    mask: jax.Array,
    temperature: float | jax.Array = 1.0,
    chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of each token of packed rows given those before it, where mask is not 0: two [B, T] arrays.

    hidden [B, T, D] are the states of `tokens` [B, T]; place t of the result is read from the state at t - 1. A
    segment's first token has no state before it: its mask must be 0 (`jax_train.packing` checks it).
    """
    logp, entropy = token_logprobs(hidden, head, _shifted(tokens, -1), temperature, chunk, _shifted(mask, -1))
    return _shifted(logp, 1), _shifted(entropy, 1)


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """x [B, T] rolled along T; rows are gathered over `context` for it."""
    return reshard(jnp.roll(reshard(x, "batch", None), by, axis=1), "batch", "length")


def _local(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    temperature: float | jax.Array,
    *,
    chunk: int,
    axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """One device's tokens over its part of the vocabulary; sums go over `axis`, where the other parts are."""
    shape, d = targets.shape, hidden.shape[-1]
    x, t, wanted = hidden.reshape(-1, d), targets.reshape(-1), mask.reshape(-1) != 0
    n = t.shape[0]
    chunk = min(chunk, n)
    pad = -n % chunk
    order = jnp.argsort(~wanted, stable=True)
    place = jnp.argsort(order, stable=True)
    x = jnp.pad(x[order], ((0, pad), (0, 0))).reshape(-1, chunk, d)
    t = jnp.pad(t[order], (0, pad)).reshape(-1, chunk)
    wanted = jnp.pad(wanted[order], (0, pad)).reshape(-1, chunk)
    offset = 0 if axis is None else lax.axis_index(axis) * head.shape[0]

    @jax.checkpoint
    def compute(x: jax.Array, t: jax.Array, wanted: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("cd,vd->cv", x, head.astype(x.dtype), preferred_element_type=jnp.float32) / temperature
        top = lax.stop_gradient(jnp.max(logits, axis=-1))
        top = top if axis is None else lax.pmax(top, axis)
        shifted = logits - top[:, None]
        weights = jnp.exp(shifted)
        ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1) + offset
        chosen = jnp.sum(jnp.where(ids == t[:, None], shifted, 0.0), axis=-1)
        total = jnp.sum(weights, axis=-1)
        mean = jnp.sum(lax.stop_gradient(weights * shifted), axis=-1)
        if axis is not None:
            total, chosen, mean = (lax.psum(value, axis) for value in (total, chosen, mean))
        log_total = jnp.log(total)
        entropy = lax.stop_gradient(log_total - mean / total)
        return jnp.where(wanted, chosen - log_total, 0.0), jnp.where(wanted, entropy, 0.0)

    def skip(x: jax.Array, t: jax.Array, wanted: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        nothing = jnp.sum(x, axis=-1).astype(jnp.float32) * 0
        return nothing, lax.stop_gradient(nothing)

    def step(_: None, chunked: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, lax.cond(jnp.any(chunked[2]), compute, skip, *chunked, head)

    if axis is not None:  # collectives must run on every device alike: nothing is skipped
        step = lambda _, chunked: (None, compute(*chunked, head))  # noqa: E731
    _, (logp, entropy) = lax.scan(step, None, (x, t, wanted))
    return logp.reshape(-1)[place].reshape(shape), entropy.reshape(-1)[place].reshape(shape)
