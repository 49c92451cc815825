"""First weights with copying built in.

A decoder that starts from noise spends millions of tokens before it can copy a name, and copying is most of what a
tool agent does. Here the first two layers start as induction heads (Olsson et al., 2022): heads of layer 0 write each
token's predecessor into a subspace of their own, heads of layer 1 look for the place whose predecessor is the present
token and copy what stands there. Everything else is drawn as usual and all of it is trained. Setting weights to what
they are known to become is "mimetic initialisation" (Trockman and Kolter, 2023).

The construction, for width D and head size K with rotary frequencies f:
- dimension 0 of every embedding is the same constant, so that a head can have a query and a key without content;
- a previous-token head uses the fast frequencies, with the key's phase one position ahead of the query's;
- an induction head uses only frequencies that turn by less than a radian over the context, as content must match at
  any distance;
- a token's embedding is its word and, in a small subspace that no copying head reads, how the word is written: ` wing`,
  `_wing` and `Wing` are the same word, so that a question and a tool's name can be matched by it, as in a policy that
  has read much text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import init_decoder, rope_frequencies

CONSTANT = 0.3
"""Value of dimension 0 of every embedding."""
SHARPNESS = 1.5
"""Gain of queries and keys after their norm, in the two layers."""
WRITE, COPY = 0.12, 0.35
"""Output scales of the previous-token and the induction heads, against embeddings of norm 1."""
QUIET = 0.1
"""Factor on the output weights of everything else."""
FAST = (0.5, 0.3, 0.2)
"""Energy of a previous-token head at the three fastest frequencies."""
TYPES, KIND = 8, 0.45
"""Dimensions of the way of writing, and its norm, against 1 for the whole embedding."""
CONTEXT = 512
"""Tokens over which a slow frequency must stay below a radian."""


def written(token: str) -> tuple[str, str]:
    """(the word, how it is written) of a byte-level token: "ĠWing" is ("wing", "Ġ A")."""
    mark = token[0] if token[:1] in ("Ġ", "_") and len(token) > 1 else ""
    word = token[len(mark) :]
    case = "a" if word.islower() else "A" if word.istitle() or word.isupper() else "-"
    return (word.lower() if word.isalpha() else token), f"{mark} {case}"


def embeddings(vocabulary: Sequence[str], width: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of norm 1 [V, width] for byte-level tokens: the word in the first `width - TYPES` places, its writing in the
    others."""
    content: dict[str, np.ndarray] = {}
    kinds: dict[str, np.ndarray] = {}
    out = np.zeros((len(vocabulary), width))
    for row, token in zip(out, vocabulary, strict=True):
        word, kind = written(token)
        if word not in content:
            content[word] = rng.standard_normal(width - TYPES) / np.sqrt(width - TYPES)
        if kind not in kinds:
            kinds[kind] = rng.standard_normal(TYPES) / np.sqrt(TYPES)
        row[:-TYPES] = np.sqrt(1 - KIND**2) * content[word]
        row[-TYPES:] = KIND * kinds[kind]
    return out


def init_copying(config: ModelConfig, seed: int, vocabulary: Sequence[str]) -> dict[str, Any]:
    """Float32 params as `init_decoder` gives them, with induction heads in layers 0 and 1; `vocabulary` is the token of
    each id.

    Needs as many key-value heads as heads, QK norm, tied embeddings, two layers, and D > 3 K + TYPES;
    ValueError otherwise.
    """
    d, k, heads = config.hidden_size, config.head_dim, config.num_heads
    copies = min(3, heads)
    content = min((d - 1) - 2 * k - TYPES, copies * k)
    if config.num_kv_heads != heads or not config.qk_norm or config.num_layers < 2 or content < k:
        raise ValueError(f"no room for induction heads in {config}")
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: np.array(x), init_decoder(config, seed)[1])
    basis = np.zeros((d, d - 1), np.float32)
    basis[1:] = np.linalg.qr(rng.standard_normal((d - 1, d - 1)))[0]
    previous, words = basis[:, : 2 * k], basis[:, 2 * k :]

    embed = embeddings(vocabulary, words.shape[1], rng) @ words.T
    words = words[:, :-TYPES]
    embed[:, 0] = CONSTANT
    params["embed"] = embed.astype(np.float32)

    layers = params["layers"]
    # The embeddings have norm 1; what the untrained rest adds to them must not drown what the heads read.
    layers["o"] *= QUIET
    layers["down"] *= QUIET
    layers["q_norm"][:2] = layers["k_norm"][:2] = SHARPNESS
    frequencies = rope_frequencies(config)
    for head in range(2):
        _clear(layers, 0, head)
        for f, energy in enumerate(FAST):
            layers["q"][0, 0, head, f] = np.sqrt(energy)
            layers["k"][0, 0, head, f] = np.sqrt(energy) * np.cos(frequencies[f])
            layers["k"][0, 0, head, f + k // 2] = np.sqrt(energy) * np.sin(frequencies[f])
        seen, written = words[:, head * k : (head + 1) * k], previous[:, head * k : (head + 1) * k]
        layers["v"][0, :, head, : seen.shape[1]] = seen
        layers["o"][0, head, : seen.shape[1]] = WRITE * written[:, : seen.shape[1]].T

    slow = np.flatnonzero(frequencies * CONTEXT < 1.5)
    places = np.concatenate([slow, slow + k // 2])
    for head in range(copies):
        _clear(layers, 1, head)
        source = (head % 2) * k
        width = min(len(places), words.shape[1] - source)
        layers["q"][1][:, head, places[:width]] = words[:, source : source + width]
        layers["k"][1][:, head, places[:width]] = previous[:, source : source + width]
        copied = words[:, head * k : (head + 1) * k]
        layers["v"][1, :, head, : copied.shape[1]] = copied
        layers["o"][1, head, : copied.shape[1]] = COPY * copied.T
    return params


def _clear(layers: dict[str, np.ndarray], layer: int, head: int) -> None:
    for name in ("q", "k", "v"):
        layers[name][layer][:, head] = 0
    layers["o"][layer, head] = 0
