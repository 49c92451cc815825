"""The small Qwen3-form model of the tests: two layers, grouped heads, one config that each test changes where it must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from astrolabe.model.config import ModelConfig

_TINY = ModelConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    max_position=64,
    qk_norm=True,
)


def tiny_config(**changes: Any) -> ModelConfig:
    return replace(_TINY, **changes)
