"""GRPO and its kin: a clipped policy gradient on group advantages, per token or per sequence.

ratio = exp(logp - old), loss = -min(ratio A, clip(ratio, 1 - low, 1 + high) A). A = advantages are constants from the
host. Variants are named options: DAPO's clip-higher (`clip_high > clip_low`), the normaliser (token, DAPO;
sequence, the GRPO paper, arXiv 2402.03300; constant, Dr. GRPO, arXiv 2503.20783), GSPO's sequence ratio
(arXiv 2507.18071), truncated importance sampling between engine and trainer, a gate on their mismatch, and a KL
penalty, off by default. The denominator counts what is left after the gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_train.losses.base import Loss, LossOutput, per_token, safe_divide, segment_matrix, segment_sums
from jax_train.packing import PackedBatch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within +-20 before `exp`: e^20 is far beyond any clip, and finite."""


@dataclass(frozen=True)
class GrpoHyper:
    clip_low: float = 0.2
    clip_high: float = 0.2
    normaliser: Literal["token", "sequence", "constant"] = "token"
    constant_length: int = 1024
    """Tokens that a sequence counts for under `constant`."""
    ratio: Literal["token", "sequence"] = "token"
    """sequence: GSPO, the geometric mean of the token ratios."""
    correction: Literal["none", "tis"] = "tis"
    """none: old is the engine's log-prob. tis: old is the trainer's, and the gap to the engine's weighs the token."""
    recomputed_old: bool = False
    """tis: old is `batch.prox_logprobs` (several updates per batch); else this very pass's, a ratio of 1."""
    tis_cap: float = 2.0
    max_mismatch: float | None = None
    """Sequences whose mean |old - engine| exceeds this (nats per token) are left out."""
    kl_beta: float = 0.0
    """Weight of KL(policy || reference) by the k3 estimator; needs `batch.ref_logprobs` above 0."""
    max_segments: int = 64
    """Upper limit of samples in a row (static)."""


def grpo_loss(hyper: GrpoHyper) -> Loss:
    """The loss for these settings."""
    return partial(_grpo, hyper)


def _grpo(hyper: GrpoHyper, logp: jax.Array, entropy: jax.Array, batch: PackedBatch) -> LossOutput:
    trained = batch.mask > 0
    members = segment_matrix(batch, hyper.max_segments)
    # Sanitised before any exp: `where` after it would still send NaN through the gradient.
    logp = jnp.where(trained, logp, 0.0)
    engine = jnp.where(trained, batch.logprobs, 0.0)
    if hyper.correction == "none":
        old = engine
    else:
        old = jnp.where(trained, batch.prox_logprobs, 0.0) if hyper.recomputed_old else lax.stop_gradient(logp)
    gap = lax.stop_gradient(old if hyper.correction == "tis" else logp) - engine

    kept = trained
    if hyper.max_mismatch is not None:
        lengths = segment_sums(batch.mask, members)
        drift = safe_divide(segment_sums(jnp.abs(gap) * batch.mask, members), lengths)
        kept = trained & (per_token((drift <= hyper.max_mismatch).astype(jnp.float32), members) > 0)
    mask = kept.astype(jnp.float32)
    lengths = segment_sums(mask, members)
    sequences = jnp.sum((lengths > 0).astype(jnp.float32))

    log_ratio = logp - old
    if hyper.ratio == "sequence":
        log_ratio = per_token(safe_divide(segment_sums(log_ratio * mask, members), lengths), members)
    log_ratio = jnp.where(kept, jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - hyper.clip_low, 1 + hyper.clip_high)
    per = -jnp.minimum(ratio * batch.advantages, clipped * batch.advantages)
    if hyper.correction == "tis":
        per = per * jnp.minimum(jnp.exp(jnp.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), hyper.tis_cap)

    tokens = jnp.sum(mask)
    metrics = {
        "entropy": (jnp.sum(entropy * mask), tokens),
        "ratio": (jnp.sum(ratio * mask), tokens),
        "clip_fraction": (jnp.sum((clipped != ratio) * mask), tokens),
        "mismatch": (jnp.sum(jnp.abs(gap) * batch.mask), jnp.sum(batch.mask)),
        "dropped_tokens": (jnp.sum(batch.mask) - tokens, jnp.sum(batch.mask)),
    }
    if hyper.kl_beta > 0:
        away = jnp.clip(jnp.where(kept, batch.ref_logprobs - logp, 0.0), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = jnp.exp(away) - away - 1
        per = per + hyper.kl_beta * kl
        metrics["kl"] = (jnp.sum(lax.stop_gradient(kl) * mask), tokens)

    per = jnp.where(kept, per, 0.0)
    if hyper.normaliser == "token":
        return jnp.sum(per), tokens, metrics
    if hyper.normaliser == "sequence":
        return jnp.sum(safe_divide(segment_sums(per, members), lengths)), sequences, metrics
    return jnp.sum(per), sequences * hyper.constant_length, metrics
