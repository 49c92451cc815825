"""Log-probs: right at every temperature and chunking, and never an array of [tokens, vocab]."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_fakes import VOCAB

from astrolabe.model.logprobs import next_token_logprobs, token_logprobs

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(37, 16)).astype(np.float32)
HEAD = RNG.normal(size=(VOCAB, 16)).astype(np.float32)
TARGETS = RNG.integers(0, VOCAB, 37).astype(np.int32)


def dense(hidden: jax.Array, head: jax.Array, temperature: float) -> jax.Array:
    return jax.nn.log_softmax(hidden @ head.T / temperature)


def test_f38_logprobs_are_those_of_the_scaled_logits() -> None:
    """Logits [2, 1, 0] at T = 0.6: -0.203, not the scaled log-prob -0.679."""
    logp, _ = token_logprobs(jnp.array([[2.0, 1.0, 0.0]]), jnp.eye(3), jnp.array([0]), temperature=0.6)
    assert float(logp[0]) == pytest.approx(-0.203, abs=1e-3)


@pytest.mark.parametrize("chunk", [5, 37, 1024])
def test_values_entropy_and_gradients_are_the_dense_ones(chunk: int) -> None:
    mask = (RNG.random(37) < 0.4).astype(np.int32)

    def chunked(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(token_logprobs(hidden, head, TARGETS, 0.7, chunk, mask)[0]) * mask)

    def plain(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(dense(hidden, head, 0.7)[jnp.arange(37), TARGETS]) * mask)

    logp, entropy = jax.jit(token_logprobs, static_argnums=4)(HIDDEN, HEAD, TARGETS, 0.7, chunk, mask)
    expected = np.asarray(dense(HIDDEN, HEAD, 0.7))
    assert np.abs(logp - expected[np.arange(37), TARGETS] * mask).max() < 1e-5
    assert np.abs(entropy + (np.exp(expected) * expected).sum(-1) * mask).max() < 1e-5
    for a, b in zip(
        jax.jit(jax.grad(chunked, (0, 1)))(HIDDEN, HEAD), jax.jit(jax.grad(plain, (0, 1)))(HIDDEN, HEAD), strict=True
    ):
        assert np.abs(a - b).max() < 1e-4


def test_d30_softmax_is_float32_below_bfloat16_activations() -> None:
    hidden, head = HIDDEN.astype(jnp.bfloat16), HEAD.astype(jnp.bfloat16)
    logp, _ = token_logprobs(hidden, head, TARGETS)
    expected = dense(hidden.astype(jnp.float32), head.astype(jnp.float32), 1.0)[np.arange(37), TARGETS]
    assert logp.dtype == jnp.float32
    assert np.abs(logp - expected).max() < 1e-4


def test_no_array_of_tokens_by_vocabulary_exists() -> None:
    tokens, vocab, d = 4096, 4096, 16
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        logp, entropy = token_logprobs(hidden, head, targets, chunk=128)
        return jnp.sum(logp) + jnp.sum(entropy)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(shape((tokens, d)), shape((vocab, d)), targets).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocab * 4 / 4


def test_place_t_is_the_probability_of_token_t_given_those_before() -> None:
    hidden = RNG.normal(size=(2, 6, 16)).astype(np.float32)
    tokens = RNG.integers(0, VOCAB, (2, 6)).astype(np.int32)
    mask = np.array([[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]], np.float32)
    logp, _ = next_token_logprobs(hidden, HEAD, tokens, mask)
    expected = np.asarray(dense(hidden, HEAD, 1.0))
    for b, t in zip(*np.nonzero(mask), strict=True):
        assert float(logp[b, t]) == pytest.approx(expected[b, t - 1, tokens[b, t]], abs=1e-5)
    assert not np.asarray(logp)[mask == 0].any()
