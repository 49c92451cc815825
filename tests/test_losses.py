"""Losses by closed form: sums and denominators, clipping, normalisers, masks that let nothing through."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_fakes import one_batch, random_samples

from jax_train.losses.base import Loss
from jax_train.losses.dpo import DpoHyper, dpo_loss
from jax_train.losses.grpo import GrpoHyper, grpo_loss
from jax_train.losses.sft import sft_loss
from jax_train.packing import PackedBatch, Sample, empty_batch


def batch_of(*rows: tuple[int, float]) -> PackedBatch:
    """One row per (number of trained tokens, advantage), engine log-probs -1."""
    n = max(size for size, _ in rows) + 1
    samples = [
        Sample(tokens=[3] * (size + 1), mask=[0] + [1] * size, logprobs=np.full(size + 1, -1.0), advantage=advantage)
        for size, advantage in rows
    ]
    parts = [one_batch([sample], 1, n) for sample in samples]
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@functools.lru_cache(maxsize=64)
def program(loss: Loss) -> Any:
    def total(logp: jax.Array, batch: PackedBatch) -> Any:
        value, denominator, metrics = loss(logp, jnp.zeros_like(logp), batch)
        return value, (denominator, metrics)

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def evaluate(loss: Loss, logp: Any, batch: PackedBatch) -> tuple[float, float, np.ndarray, dict[str, float]]:
    """(sum, denominator, gradient by logp, metric means)."""
    (value, (denominator, metrics)), grad = program(loss)(jnp.asarray(logp, jnp.float32), batch)
    means = {name: float(a) / max(float(b), 1e-9) for name, (a, b) in metrics.items()}
    return float(value), float(denominator), np.asarray(grad), means


def small(**options: Any) -> Loss:
    return grpo_loss(GrpoHyper(max_segments=4, **options))


ALL_LOSSES = [sft_loss, small(kl_beta=0.1), small(correction="none", ratio="sequence", normaliser="sequence")]
ALL_LOSSES += [small(normaliser="constant", max_mismatch=0.5), dpo_loss(DpoHyper(max_segments=4, sft_weight=0.1))]


def test_sft_is_the_sum_over_trained_tokens() -> None:
    batch = batch_of((2, 0.0), (1, 0.0))
    value, denominator, grad, _ = evaluate(sft_loss, batch.mask * -2.0, batch)
    assert (value, denominator) == (6.0, 3.0)
    assert (grad == -batch.mask).all()


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_d25_a_batch_without_a_trained_token_is_zero_and_finite(loss: Loss) -> None:
    value, denominator, grad, _ = evaluate(loss, np.zeros((2, 8)), empty_batch(2, 8))
    assert value == 0.0
    assert denominator == 0.0
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("loss", ALL_LOSSES)
@pytest.mark.parametrize("poison", [-1e4, -np.inf, np.nan])
def test_d26_nothing_leaks_through_the_mask(loss: Loss, poison: float) -> None:
    """Whatever stands at masked places, loss and gradient are those of the clean batch."""
    clean = one_batch(random_samples(4), 2, 32, together=2)
    logp = np.where(clean.mask > 0, -3.0, 0.0)
    spoil = {
        name: np.where(clean.mask > 0, getattr(clean, name), np.float32(poison))
        for name in ("logprobs", "prox_logprobs", "ref_logprobs")
    }
    dirty = replace(clean, **spoil, tokens=np.where(clean.mask > 0, clean.tokens, 9))
    a, b = evaluate(loss, logp, clean), evaluate(loss, np.where(clean.mask > 0, logp, poison), dirty)
    assert a[:2] == pytest.approx(b[:2])
    assert np.isfinite(b[2]).all()
    assert np.allclose(a[2], b[2])


def test_clip_is_one_sided_and_higher_where_asked() -> None:
    ratio = np.array([[0, 1.1, 1.25, 1.5]])
    logp = np.log(np.maximum(ratio, 1e-9)) - 1.0
    up, down = batch_of((3, 1.0)), batch_of((3, -1.0))
    symmetric = small(correction="none")
    assert evaluate(symmetric, logp, up)[2][0, 1:] == pytest.approx([-1.1, 0, 0], abs=1e-5)
    assert evaluate(small(correction="none", clip_high=0.28), logp, up)[2][0, 1:] == pytest.approx(
        [-1.1, -1.25, 0], abs=1e-5
    )
    assert evaluate(symmetric, logp, down)[2][0, 1:] == pytest.approx([1.1, 1.25, 1.5], abs=1e-5)
    assert evaluate(symmetric, logp, up)[3]["clip_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("normaliser", "short", "long"),
    [("token", 1 / 110, 1 / 110), ("sequence", 1 / (2 * 10), 1 / (2 * 100)), ("constant", 1 / 256, 1 / 256)],
)
def test_d29_each_normaliser_has_its_gradient_per_token(normaliser: str, short: float, long: float) -> None:
    """Sequences of 10 and 100 tokens with advantages 1 and -1."""
    batch = batch_of((10, 1.0), (100, -1.0))
    _, denominator, grad, _ = evaluate(small(normaliser=normaliser, constant_length=128), batch.mask * -1.0, batch)
    assert grad[0, 1] / denominator == pytest.approx(-short, rel=1e-5)
    assert grad[1, 1] / denominator == pytest.approx(long, rel=1e-5)
    assert not grad[batch.mask == 0].any()


def test_truncated_importance_sampling_weighs_by_the_gap_to_the_engine_up_to_its_cap() -> None:
    logp = np.array([[0, -1.0, -0.5, 2.0]])  # gaps 0, 0.5, 3 to the engine's -1
    grad = evaluate(small(), logp, batch_of((3, 1.0)))[2]
    assert grad[0, 1:] == pytest.approx([-1.0, -np.exp(0.5), -2.0], rel=1e-5)


def test_recomputed_old_logprobs_carry_the_ratio_and_the_weight() -> None:
    batch = batch_of((1, 1.0))
    batch = replace(batch, prox_logprobs=np.array([[0, -0.9]], np.float32))
    value = evaluate(small(recomputed_old=True), np.array([[0, -0.8]]), batch)[0]
    assert value == pytest.approx(-np.exp(0.1) * np.exp(0.1), rel=1e-5)


def test_gspo_uses_one_ratio_per_sequence() -> None:
    logp = np.array([[0, -1.0 + 0.1, -1.0 - 0.1, -1.0 + 0.15]])
    batch = batch_of((3, 1.0))
    value = evaluate(small(ratio="sequence", correction="none"), logp, batch)[0]
    assert value == pytest.approx(-3 * np.exp(0.05), rel=1e-5)


def test_d25_sequences_over_the_mismatch_limit_leave_the_denominator_too() -> None:
    batch = batch_of((2, 1.0), (2, 1.0))
    logp = np.array([[0, -1.0, -1.0], [0, -3.0, -3.0]])
    loss = small(max_mismatch=1.0)
    value, denominator, grad, means = evaluate(loss, logp, batch)
    assert (value, denominator) == (-2.0, 2.0)
    assert not grad[1].any()
    assert means["dropped_tokens"] == pytest.approx(0.5)


def test_kl_penalty_is_k3_and_zero_at_the_reference() -> None:
    batch = batch_of((1, 0.0))
    at = replace(batch, ref_logprobs=np.array([[0, -1.0]], np.float32))
    away = replace(batch, ref_logprobs=np.array([[0, -1.5]], np.float32))
    loss = small(kl_beta=2.0)
    logp = np.array([[0, -1.0]])
    assert evaluate(loss, logp, at)[0] == 0.0
    assert evaluate(loss, logp, away)[0] == pytest.approx(2.0 * (np.exp(-0.5) + 0.5 - 1), rel=1e-5)


def test_dpo_is_the_log_sigmoid_of_the_margin_over_trained_tokens_of_both_sides() -> None:
    chosen = Sample(tokens=[3, 4, 5, 6], mask=[0, 1, 0, 1], ref_logprobs=np.array([0, -1.0, 0, -2.0]))
    rejected = Sample(tokens=[3, 7, 8], mask=[0, 0, 1], ref_logprobs=np.array([0, 0, -1.0]))
    batch = one_batch([chosen, rejected], 1, 10, together=2)
    logp = np.array([[0, -0.5, -99, -1.5, 0, -99, -3.0, 0, 0, 0]])
    value, denominator, grad, means = evaluate(dpo_loss(DpoHyper(beta=0.5, max_segments=2)), logp, batch)
    margin = (0.5 + 0.5) - (-2.0)
    assert value == pytest.approx(np.log1p(np.exp(-0.5 * margin)), rel=1e-5)
    assert denominator == 1.0
    assert means["accuracy"] == 1.0
    assert (np.nonzero(grad[0])[0] == [1, 3, 6]).all()
    assert grad[0, 1] == grad[0, 3] == -grad[0, 6]
