"""Supervised fine-tuning: cross entropy over the trained tokens, divided by their number in the whole step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_train.losses.base import LossOutput
from jax_train.packing import PackedBatch


def sft_loss(logp: jax.Array, entropy: jax.Array, batch: PackedBatch) -> LossOutput:
    """-sum(logp) over trained tokens; the denominator is their number. Metric: entropy per trained token (nats)."""
    tokens = jnp.sum(batch.mask)
    loss = -jnp.sum(jnp.where(batch.mask > 0, logp, 0.0))
    return loss, tokens, {"entropy": (jnp.sum(entropy * batch.mask), tokens)}
