"""The GRPO phase: what it trains on, the gate between engine and trainer, resume, and that reward rises."""

from __future__ import annotations

import numpy as np
import pytest

from astrolabe.records.errors import RunError
from jax_train.agreement import MismatchGate, agreement


def sampled_logprobs(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(trainer's, engine's) log-probs of 4000 ids that a faulty engine drew from random logits."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4000, 50)) * 2
    full = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    drawn_from = logits / temperature
    probs = np.exp(drawn_from - np.log(np.exp(drawn_from).sum(-1, keepdims=True)))
    if top_p < 1:
        order = np.argsort(-probs, axis=-1)
        ranked = np.take_along_axis(probs, order, -1)
        kept = np.cumsum(ranked, -1) - ranked < top_p
        np.put_along_axis(probs, order, np.where(kept, ranked, 0), -1)
        probs /= probs.sum(-1, keepdims=True)
    ids = (probs.cumsum(-1) > rng.random((4000, 1))).argmax(-1)[:, None]
    return np.take_along_axis(full, ids, -1)[:, 0], np.log(np.take_along_axis(probs, ids, -1)[:, 0])


def test_f38_the_gate_is_quiet_for_equal_mathematics_and_trips_on_a_wrong_temperature_or_top_p():
    trainer, engine = sampled_logprobs()
    noise = np.random.default_rng(1).normal(size=engine.shape) * 1e-4
    assert not MismatchGate().check(agreement(trainer, engine + noise, np.ones(4000)))
    for fault in ({"temperature": 0.6}, {"temperature": 1.5}, {"top_p": 0.8}):
        trainer, engine = sampled_logprobs(**fault)
        found = agreement(trainer, engine, np.ones(4000))
        assert found.kl > MismatchGate().warn
        with pytest.raises(RunError, match="engine and trainer disagree"):
            MismatchGate(stop=0.01).check(found)


def test_f38_a_log_prob_that_is_no_number_ends_the_run_and_masked_ones_do_not_count():
    trainer, engine = np.array([-1.0, np.nan]), np.array([-1.0, -2.0])
    assert agreement(trainer, engine, [1, 0]).kl == 0.0
    assert agreement(trainer, engine, [0, 0]).tokens == 0
    with pytest.raises(RunError):
        MismatchGate().check(agreement(trainer, engine, [1, 1]))
