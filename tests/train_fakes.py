"""Small models and token rows for the tests of model and trainer."""

from __future__ import annotations

import os

# Tiny programs gain nothing from the compiler's slow passes. Read when JAX makes its first array.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from tiny_model import tiny_config

from astrolabe.model.config import RopeScaling
from jax_train.packing import PackedBatch, Sample, pack

VOCAB = 64
QWEN3 = tiny_config(vocab_size=VOCAB, intermediate_size=24, eos_token_ids=(1, 2), pad_token_id=1)
LLAMA = replace(
    QWEN3,
    model_type="llama",
    qk_norm=False,
    tie_embeddings=False,
    rope_theta=5e5,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
)
QWEN2 = replace(QWEN3, model_type="qwen2", qk_norm=False, qkv_bias=True, num_kv_heads=1)


def random_samples(n: int, *, seed: int = 0, low: int = 5, high: int = 14, **extra: Any) -> list[Sample]:
    """Samples with random ids, masks, engine and reference log-probs, and advantages."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        size = int(rng.integers(low, high))
        mask = (rng.random(size) < 0.5).astype(int)
        mask[0], mask[-1] = 0, 1
        out.append(
            Sample(
                tokens=rng.integers(0, VOCAB, size),
                mask=mask,
                logprobs=rng.normal(-4, 0.3, size),
                ref_logprobs=rng.normal(-4, 0.3, size),
                advantage=float(rng.normal()),
                item=f"s{i}",
                **extra,
            )
        )
    return out


def one_batch(samples: list[Sample], rows: int, budget: int, together: int = 1) -> PackedBatch:
    batches, _ = pack(samples, rows, budget, vocab_size=VOCAB, together=together)
    assert len(batches) == 1
    return batches[0]


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
