"""The optimizer step: any split gives the same update, tool tokens give none, bad batches change nothing."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from train_fakes import QWEN3, VOCAB, flat, one_batch, random_samples

from astrolabe.model.decoder import init_decoder
from jax_train.losses.sft import sft_loss
from jax_train.packing import PackedBatch, Sample, empty_batch, stack
from jax_train.step import (
    Compute,
    Step,
    TrainState,
    init_state,
    make_gradient,
    make_optimizer,
    make_schedule,
    make_step,
)

SCHEDULE = make_schedule("constant", 1e-2, 10, 0, 1.0)
OPTIMIZER = make_optimizer(SCHEDULE, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01, mu_dtype=None)


@pytest.fixture(scope="module")
def step() -> Step:
    return make_step(QWEN3, sft_loss, OPTIMIZER, SCHEDULE, compute=Compute(chunk=16), clip_norm=1.0)


def fresh() -> TrainState:
    return init_state(init_decoder(QWEN3, 0)[1], OPTIMIZER)


def split(batch: PackedBatch, micro: int) -> PackedBatch:
    return jax.tree.map(lambda x: x.reshape(micro, -1, x.shape[-1]), batch)


def test_d28_every_split_into_micro_batches_gives_the_same_gradient() -> None:
    """Rows with very unequal numbers of trained tokens: a mean of means would differ."""
    few = Sample(tokens=np.arange(1, 15) % VOCAB, mask=[0] * 13 + [1])
    many = Sample(tokens=np.arange(20, 34) % VOCAB, mask=[0] + [1] * 13)
    rows = [one_batch([sample], 1, 16) for sample in (few, many, many, few)]
    batch: PackedBatch = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    params = init_decoder(QWEN3, 0)[1]
    gradient = jax.jit(make_gradient(QWEN3, sft_loss, Compute(chunk=16)))
    found = []
    for micro in (1, 4):
        grads, total, denominator, _ = gradient(params, split(batch, micro))
        found.append(np.append(flat(grads) / float(denominator), float(total) / float(denominator)))
    assert np.abs(found[0] - found[1]).max() < 1e-6


def test_changing_a_tool_tokens_target_changes_no_gradient() -> None:
    """The last token is the tool's: it is nobody's context, so only its target could matter."""
    params = init_decoder(QWEN3, 0)[1]
    gradient = jax.jit(make_gradient(QWEN3, sft_loss, Compute(chunk=16)))
    found = []
    for last in (7, 50):
        batch = one_batch([Sample(tokens=[3, 4, 5, 6, last], mask=[0, 1, 1, 0, 0])], 1, 8)
        grads, *_ = gradient(params, stack([batch]))
        found.append(flat(grads))
    assert (found[0] == found[1]).all()
    assert found[0].any()


def test_d25_an_all_masked_step_and_one_that_is_not_finite_change_nothing_and_are_counted(step: Step) -> None:
    state = fresh()
    before = flat((state.params, state.opt_state))
    batch = one_batch(random_samples(3), 2, 32)
    state, report = step(state, stack([empty_batch(2, 32)]))
    assert float(report["loss"]) == 0.0
    assert (flat((state.params, state.opt_state)) == before).all()
    assert (int(state.step), int(state.skipped), int(report["skipped"])) == (0, 1, 1)
    poisoned = replace(state, params={**state.params, "norm": state.params["norm"] * np.nan})
    poisoned, report = step(poisoned, stack([batch]))
    assert (int(poisoned.step), int(poisoned.skipped)) == (0, 2)


def test_d30_one_program_serves_all_batches_and_the_loss_falls(step: Step) -> None:
    state = fresh()
    losses = []
    programs = step._cache_size()  # type: ignore[attr-defined]
    for seed in range(12):
        state, report = step(state, stack([one_batch(random_samples(2, seed=seed % 2), 2, 32)]))
        losses.append(float(report["loss"]))
    assert step._cache_size() <= max(programs, 1)  # type: ignore[attr-defined]
    assert losses[-1] < losses[0]
    assert int(state.step) == 12


def test_schedules() -> None:
    warm = make_schedule("cosine", 1.0, 110, 10, 0.1)
    assert [float(warm(s)) for s in (0, 10, 110)] == pytest.approx([1 / 11, 1.0, 0.1])
    assert float(make_schedule("linear", 1.0, 10, 0, 0.0)(5)) == pytest.approx(0.5)
    assert float(make_schedule("constant", 0.3, 10, 0, 0.0)(9)) == pytest.approx(0.3)


def test_weight_decay_leaves_norms_alone() -> None:
    state = fresh()
    zero = jax.tree.map(np.zeros_like, state.params)
    updates, _ = OPTIMIZER.update(zero, state.opt_state, state.params)
    assert not np.asarray(updates["norm"]).any()
    assert not np.asarray(updates["layers"]["attn_norm"]).any()
    assert not np.asarray(updates["layers"]["q_norm"]).any()
    assert np.asarray(updates["layers"]["gate"]).any()
    assert np.asarray(updates["embed"]).any()
