"""One optimizer step as one jitted function of (state, micro-batches).

The state is pure and donated. Micro-batches go through a `lax.scan` that adds up gradients, loss sums, denominators and
metrics; there is one division, by the denominator of the whole step, so every split gives the same update. A step
without a trained token, or with a gradient that is not finite, changes nothing and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import Params, head_weights, hidden
from astrolabe.model.logprobs import next_token_logprobs
from jax_train.losses.base import Loss, Metrics, safe_divide
from jax_train.packing import PackedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    params: Params
    opt_state: Any
    step: Any
    """int32: updates that were applied."""
    skipped: Any
    """int32: steps that changed nothing."""


@dataclass(frozen=True)
class Compute:
    """How the decoder is run (all static)."""

    dtype: str = "float32"
    """Of activations and matmuls; weights, gradients and optimizer stay as they are."""
    remat: str = "none"
    unroll: int = 1
    chunk: int = 1024
    """Tokens whose logits exist at a time."""


def _decayed(params: Params) -> Any:
    """Weight decay goes to matrices, not to norms and biases."""
    return jax.tree.map_with_path(lambda path, _: not path[-1].key.endswith(("norm", "_bias")), params)


def make_schedule(
    kind: str, peak: float, total_steps: int, warmup_steps: int, final_fraction: float
) -> Callable[[Any], Any]:
    """Learning rate by step: linear warm-up, then constant, linear or cosine decay to `final_fraction` of the peak."""
    decay_steps = max(1, total_steps - warmup_steps)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, final_fraction),
        "linear": lambda: optax.linear_schedule(peak, peak * final_fraction, decay_steps),
    }[kind]()
    if warmup_steps == 0:
        return after
    # The first step is not wasted on a rate of 0.
    warmup = optax.linear_schedule(peak / (warmup_steps + 1), peak, warmup_steps)
    return optax.join_schedules([warmup, after], [warmup_steps])


def make_optimizer(
    schedule: Callable[[Any], Any], *, b1: float, b2: float, eps: float, weight_decay: float, mu_dtype: str | None
) -> optax.GradientTransformation:
    """AdamW; gradients are clipped in the step, where their norm is known."""
    return optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decayed, mu_dtype=mu_dtype)


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Step 0. Moments take the shardings of the weights. The params are owned by the state from here on (donated)."""
    return TrainState(params, jax.jit(optimizer.init)(params), jnp.int32(0), jnp.int32(0))


def batch_logprobs(
    params: Params, config: ModelConfig, compute: Compute, batch: PackedBatch, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy [rows, budget] of the trained tokens of a packed batch; 0 elsewhere."""
    states = hidden(
        params,
        config,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        remat=compute.remat,
        dtype=jnp.dtype(compute.dtype),
        unroll=compute.unroll,
    )
    return next_token_logprobs(
        states, head_weights(params), batch.tokens, batch.mask, temperature=temperature, chunk=compute.chunk
    )


def make_logprob_pass(
    config: ModelConfig, compute: Compute, temperature: float = 1.0
) -> Callable[[Params, PackedBatch], jax.Array]:
    """A jitted forward pass: (params, batch [rows, budget]) -> logp [rows, budget]."""
    return jax.jit(lambda params, batch: batch_logprobs(params, config, compute, batch, temperature)[0])


def make_eval(
    config: ModelConfig, loss: Loss, compute: Compute
) -> Callable[[Params, PackedBatch], tuple[jax.Array, jax.Array]]:
    """A jitted forward pass: (params, batch [rows, budget]) -> (loss sum, denominator)."""

    def evaluate(params: Params, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        return loss(*batch_logprobs(params, config, compute, batch), batch)[:2]

    return jax.jit(evaluate)


Step = Callable[[TrainState, PackedBatch], tuple[TrainState, dict[str, jax.Array]]]


def make_gradient(config: ModelConfig, loss: Loss, compute: Compute, temperature: float = 1.0) -> Callable[..., Any]:
    """(params, batch [micro, rows, budget]) -> (summed gradients, loss sum, denominator, metrics as (sum, count))."""

    def loss_sum(params: Params, batch: PackedBatch) -> tuple[jax.Array, tuple[jax.Array, Metrics]]:
        logp, entropy = batch_logprobs(params, config, compute, batch, temperature)
        total, denominator, metrics = loss(logp, entropy, batch)
        return total, (denominator, metrics)

    def one(params: Params, batch: PackedBatch) -> Any:
        (total, (denominator, metrics)), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, batch)
        return grads, total, denominator, metrics

    def gradient(params: Params, micro: PackedBatch) -> Any:
        first = jax.tree.map(lambda x: x[0], micro)
        if micro.tokens.shape[0] == 1:
            return one(params, first)
        shapes = jax.eval_shape(one, params, first)
        zeros = (
            jax.tree.map(jnp.zeros_like, params),
            *jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[1:]),
        )

        def add(carry: Any, batch: PackedBatch) -> tuple[Any, None]:
            # An empty micro-batch (the filling of a fixed shape) costs nothing.
            more = lambda: jax.tree.map(jnp.add, carry, one(params, batch))  # noqa: E731
            return lax.cond(jnp.any(batch.mask > 0), more, lambda: carry), None

        return lax.scan(add, zeros, micro)[0]

    return gradient


def make_step(
    config: ModelConfig,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Any], Any],
    *,
    compute: Compute,
    clip_norm: float,
    temperature: float = 1.0,
) -> Step:
    """The jitted step. Metrics: loss, grad_norm (before clipping), lr, denominator, skipped, and the loss's own."""
    gradient = make_gradient(config, loss, compute, temperature)

    def step(state: TrainState, micro: PackedBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, total, denominator, metrics = gradient(state.params, micro)
        scale = safe_divide(1.0, denominator)
        grads = jax.tree.map(lambda g: g * scale, grads)
        norm = optax.tree.norm(grads)
        good = (denominator > 0) & jnp.isfinite(norm) & jnp.isfinite(total)
        shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12)) if clip_norm > 0 else 1.0
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g * shrink, grads), state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state)
        params, opt_state = jax.tree.map(
            lambda after, before: jnp.where(good, after, before), new, (state.params, state.opt_state)
        )
        after = TrainState(params, opt_state, state.step + good, state.skipped + ~good)
        report = {name: safe_divide(*pair) for name, pair in metrics.items()}
        report |= {
            "loss": total * scale,
            "grad_norm": norm,
            "lr": jnp.asarray(schedule(state.step), jnp.float32),
            "denominator": denominator,
            "skipped": (~good).astype(jnp.int32),
        }
        return after, report

    return jax.jit(step, donate_argnums=0)
