"""Direct preference optimisation (arXiv 2305.18290) on packed pairs.

Pair k of a row is its segments 2k+1 (chosen) and 2k+2 (rejected). A side's score is the sum over its trained tokens of
logp - ref: tokens that the policy did not sample (tools, template, the shared prompt) are masked on both sides. The
reference's log-probs are constants of the batch, computed once before training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_train.losses.base import Loss, LossOutput, safe_divide, segment_matrix, segment_sums
from jax_train.packing import PackedBatch


@dataclass(frozen=True)
class DpoHyper:
    beta: float = 0.1
    length_normalise: bool = False
    """Scores per trained token instead of summed."""
    sft_weight: float = 0.0
    """Adds this times the chosen side's mean negative log-prob per token (keeps the chosen likely)."""
    max_segments: int = 64
    """Upper limit of samples in a row (static, even)."""


def dpo_loss(hyper: DpoHyper) -> Loss:
    """The loss for these settings."""
    return partial(_dpo, hyper)


def _dpo(hyper: DpoHyper, logp: jax.Array, entropy: jax.Array, batch: PackedBatch) -> LossOutput:
    members = segment_matrix(batch, hyper.max_segments)
    trained = batch.mask > 0
    lengths = segment_sums(batch.mask, members)
    gain = segment_sums(jnp.where(trained, logp - batch.ref_logprobs, 0.0), members)
    chosen_logp = safe_divide(segment_sums(jnp.where(trained, logp, 0.0), members), lengths)[:, 0::2]
    if hyper.length_normalise:
        gain = safe_divide(gain, lengths)
    # A pair with no trained token on either side says nothing.
    valid = (lengths[:, 0::2] + lengths[:, 1::2] > 0).astype(jnp.float32)
    margin = gain[:, 0::2] - gain[:, 1::2]
    per = -jax.nn.log_sigmoid(hyper.beta * margin) - hyper.sft_weight * chosen_logp
    pairs = jnp.sum(valid)
    metrics = {
        "margin": (jnp.sum(margin * valid), pairs),
        "accuracy": (jnp.sum((margin > 0) * valid), pairs),
        "chosen_gain": (jnp.sum(gain[:, 0::2] * valid), pairs),
        "rejected_gain": (jnp.sum(gain[:, 1::2] * valid), pairs),
        "chosen_logp": (jnp.sum(chosen_logp * valid), pairs),
        "entropy": (jnp.sum(entropy * batch.mask), jnp.sum(batch.mask)),
    }
    return jnp.sum(jnp.where(valid > 0, per, 0.0)), pairs, metrics
