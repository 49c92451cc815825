"""Distractors: tools that look like the true ones, in three bands of likeness.

A candidate is embedded as its name, description and argument names, and measured against its closest true tool: above
0.85 is `high`, 0.4 to 0.85 `medium`, below 0.4 `low` (ASTRA's bands). English uses MiniLM; for Chinese, which MiniLM
does not know, or where no embedding is installed, character n-grams are compared and the bands are cut by quantile,
since their cosines mean nothing on MiniLM's scale. Whether a distractor gives an answer away is the gates' question.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from astrolabe.model.embedding import EmbeddingUnavailable, embed
from astrolabe.records.environment import Distractor, EnvTool

Band = Literal["high", "medium", "low"]
BANDS: tuple[Band, ...] = ("high", "medium", "low")
HIGH, LOW = 0.85, 0.40
DEFAULT_COUNTS: dict[Band, int] = {"high": 1, "medium": 2, "low": 1}

Embed = Callable[[Sequence[str]], Any]
"""Texts to unit vectors [N, D]."""


def tool_text(tool: EnvTool) -> str:
    """What of a tool is embedded."""
    arguments = ", ".join(tool.parameters.get("properties", {}))
    return f"{re.sub(r'[_.-]+', ' ', tool.name)}. {tool.description} {arguments}".strip()


def ngram_vectors(texts: Sequence[str], sizes: Sequence[int] = (1, 2, 3)) -> np.ndarray:
    """Unit vectors [N, V] of character n-gram counts (log-scaled), spaces and punctuation left out."""
    counts = []
    for text in texts:
        body = re.sub(r"[\W_]+", "", text.casefold())
        counts.append(Counter(body[i : i + size] for size in sizes for i in range(len(body) - size + 1)))
    vocabulary = {gram: i for i, gram in enumerate(sorted(set().union(*counts)))} if counts else {}
    out = np.zeros((len(texts), max(1, len(vocabulary))))
    for row, count in enumerate(counts):
        for gram, times in count.items():
            out[row, vocabulary[gram]] = 1 + math.log(times)
    return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)


def similarities(true_tools: Sequence[EnvTool], pool: Sequence[EnvTool], vectors: Embed) -> np.ndarray:
    """Cosine [N] of each candidate to its closest true tool."""
    all_vectors = np.asarray(vectors([*map(tool_text, true_tools), *map(tool_text, pool)]))
    true, candidates = all_vectors[: len(true_tools)], all_vectors[len(true_tools) :]
    return (candidates @ true.T).max(axis=1)


def bands_by_threshold(similarity: np.ndarray) -> list[Band]:
    return ["high" if s > HIGH else "low" if s < LOW else "medium" for s in similarity]


def bands_by_quantile(similarity: np.ndarray) -> list[Band]:
    """The most alike fifth is `high`, the least alike half `low`."""
    if not len(similarity):
        return []
    high, low = np.quantile(similarity, 0.8), np.quantile(similarity, 0.5)
    return ["high" if s >= high and s > low else "low" if s < low else "medium" for s in similarity]


def band_distractors(
    true_tools: Sequence[EnvTool],
    pool: Sequence[EnvTool],
    rng: random.Random,
    counts: Mapping[Band, int] | None = None,
    language: str = "en",
    *,
    endpoint: Embed | None = None,
) -> list[Distractor]:
    """Seeded draws from the bands: up to `counts[band]` distractors of each (default 1, 2, 1), no name twice and none of
    a true tool. Where a band runs short the next lower ones fill up, so that the number of distractors says nothing.

    `endpoint`: vectors from a server, used in place of MiniLM for any language, with MiniLM's thresholds.
    """
    counts = DEFAULT_COUNTS if counts is None else counts
    taken = {tool.name for tool in true_tools}
    usable = []
    for tool in pool:
        if tool.name not in taken:
            taken.add(tool.name)
            usable.append(tool)
    if not usable or not true_tools:
        return []
    similarity, bands = _banded(true_tools, usable, language, endpoint)
    by_band = {band: [i for i, b in enumerate(bands) if b == band] for band in BANDS}
    chosen: list[int] = []
    short = 0
    for band in BANDS:
        wanted = counts.get(band, 0) + short
        drawn = rng.sample(by_band[band], min(wanted, len(by_band[band])))
        short = wanted - len(drawn)
        chosen += drawn
    return [
        Distractor(**usable[i].model_dump(), band=bands[i], similarity=round(float(similarity[i]), 4)) for i in chosen
    ]


def _banded(
    true_tools: Sequence[EnvTool], pool: Sequence[EnvTool], language: str, endpoint: Embed | None
) -> tuple[np.ndarray, list[Band]]:
    if endpoint is not None:
        similarity = similarities(true_tools, pool, endpoint)
        return similarity, bands_by_threshold(similarity)
    if language != "zh":
        try:
            similarity = similarities(true_tools, pool, embed)
        except EmbeddingUnavailable:
            pass
        else:
            return similarity, bands_by_threshold(similarity)
    similarity = similarities(true_tools, pool, ngram_vectors)
    return similarity, bands_by_quantile(similarity)
