"""Log-probabilities of tokens: the only place that meets the vocabulary.

Hidden states are flattened to tokens and taken in chunks under a scan with rematerialisation, so that no array of
[tokens, vocab] exists, forward or backward. Logits and log-softmax are float32. With a mesh each device works on
its own tokens and, over `tensor`, on its own part of the vocabulary (`shard_map`, with a max and two sums across).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from astrolabe.model.sharding import has_mesh, partition, reshard


def token_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float | jax.Array = 1.0, chunk: int = 1024
) -> tuple[jax.Array, jax.Array]:
    """log softmax(hidden @ head.T / temperature)[target], and the entropy of that distribution in nats.

    hidden [..., D], head [V, D], targets [...] int32 with the leading axes of hidden: [N], or [B, T] under a mesh.
    Returns two float32 arrays of targets' shape. The entropy carries no gradient. At most [chunk, V] logits exist
    at a time. Targets out of range give the log-probability of no token: check ids on the host.
    """
    if not has_mesh():
        return _local(hidden, head, targets, temperature, chunk, None)
    rows = partition("batch", "length")
    fn = jax.shard_map(
        partial(_local, temperature=temperature, chunk=chunk, axis="tensor"),
        in_specs=(partition("batch", "length", "act_embed"), partition("vocab", None), rows),
        out_specs=(rows, rows),
    )
    return fn(hidden, reshard(head, "vocab", None), targets)


def _local(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: float | jax.Array,
    chunk: int,
    axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The log-probs of one device's tokens over its part of the vocabulary; `axis` sums over the other parts."""
    shape, d = targets.shape, hidden.shape[-1]
    x, t = hidden.reshape(-1, d), targets.reshape(-1)
    n = t.shape[0]
    chunk = min(chunk, n)
    pad = -n % chunk
    x = jnp.pad(x, ((0, pad), (0, 0))).reshape(-1, chunk, d)
    t = jnp.pad(t, (0, pad)).reshape(-1, chunk)
    offset = 0 if axis is None else lax.axis_index(axis) * head.shape[0]

    @jax.checkpoint
    def one(x: jax.Array, t: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("cd,vd->cv", x, head.astype(x.dtype), preferred_element_type=jnp.float32) / temperature
        top = lax.stop_gradient(jnp.max(logits, axis=-1))
        top = top if axis is None else lax.pmax(top, axis)
        shifted = logits - top[:, None]
        total = jnp.sum(jnp.exp(shifted), axis=-1)
        place = lax.broadcasted_iota(jnp.int32, logits.shape, 1) + offset
        chosen = jnp.sum(jnp.where(place == t[:, None], shifted, 0.0), axis=-1)
        frozen = lax.stop_gradient(shifted)
        mean = jnp.sum(jnp.exp(frozen) * frozen, axis=-1)
        if axis is not None:
            total, chosen, mean = (lax.psum(value, axis) for value in (total, chosen, mean))
        log_total = jnp.log(total)
        return chosen - log_total, lax.stop_gradient(log_total - mean / total)

    if x.shape[0] == 1:
        logp, entropy = one(x[0], t[0], head)
    else:
        _, (logp, entropy) = lax.scan(lambda _, xt: (None, one(*xt, head)), None, (x, t))
    return logp.reshape(-1)[:n].reshape(shape), entropy.reshape(-1)[:n].reshape(shape)
