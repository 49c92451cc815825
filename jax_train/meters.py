"""Speed and work of a step: tokens per second, padding, and floating-point operations by formula.

Operations count the matmuls of forward and backward: 6 per weight and token (the head counts for every token, the
embedding look-up for none), and 6 L H K per token and token of its own segment before it (attention, the causal half
once). Recomputation is not counted. The compiler's own count misses kernels, so it is not used.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from astrolabe.model.config import ModelConfig
from jax_train.packing import PackedBatch, pad_fraction


def step_flops(config: ModelConfig, batch: PackedBatch) -> float:
    """Operations of one training step on a batch [micro, rows, budget]."""
    segments = np.asarray(batch.segment_ids).reshape(-1, batch.tokens.shape[-1])
    keys = np.arange(len(segments))[:, None] * (int(segments.max()) + 1) + segments
    lengths = np.bincount(keys[segments > 0].ravel()).astype(np.float64)
    d, k = config.hidden_size, config.head_dim
    layer = 2 * d * config.num_heads * k + 2 * d * config.num_kv_heads * k + 3 * d * config.intermediate_size
    weights = config.num_layers * layer + config.vocab_size * d
    attention = 6.0 * config.num_layers * config.num_heads * k * float(np.sum(lengths**2))
    return 6.0 * weights * float(lengths.sum()) + attention


class Meter:
    """Times steps. The first one, which compiles, has no speed."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._last: float | None = None

    def start(self) -> None:
        """A step begins now (and not when the last one ended: validation or saving lay between)."""
        self._last = time.monotonic()

    def measure(self, batch: PackedBatch) -> dict[str, Any]:
        """Tokens (padding left out), padding and speed of the step that ends now; its results must be on the host."""
        assert self._last is not None
        seconds = max(time.monotonic() - self._last, 1e-9)
        tokens = int(np.sum(np.asarray(batch.segment_ids) > 0))
        devices = jax.device_count()
        return {
            "tokens": tokens,
            "trained_tokens": int(np.sum(np.asarray(batch.mask))),
            "padding": round(pad_fraction(batch), 4),
            "step_s": round(seconds, 4),
            "tokens_per_s": round(tokens / seconds, 1),
            "tflops_per_s_per_device": round(step_flops(self._config, batch) / seconds / devices / 1e12, 6),
        }
