"""Distractor bands, and the embedding that they are cut by."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gate_cases import schema

from astrolabe.envs import distractors
from astrolabe.envs.distractors import (
    band_distractors,
    bands_by_quantile,
    bands_by_threshold,
    ngram_vectors,
    similarities,
)
from astrolabe.model.embedding import EmbeddingUnavailable, embed
from astrolabe.records.environment import EnvTool


def tool(name: str, description: str, *arguments: str) -> EnvTool:
    return EnvTool(name=name, description=description, parameters=schema(dict.fromkeys(arguments, "string")), code="")


FEE = tool("bag_fee", "Price of extra bags on a booking.", "booking", "bags")
POOL = [
    tool("baggage_fee", "Price of extra bags on a booking.", "booking", "bags"),
    tool("seat_of", "Seat of a passenger on a booking.", "booking", "leg"),
    tool("boil_egg", "How long to boil an egg.", "size"),
    tool("moon_phase", "Phase of the moon on a day.", "day"),
    tool("bag_fee", "The same name as the true tool.", "booking"),
]


def test_embeddings_are_unit_vectors_and_known_pairs_keep_their_cosine() -> None:
    vectors = embed(["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby.", ""])
    assert vectors.shape == (4, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    # The model card's own example pair; published cosines of all-MiniLM-L6-v2.
    assert vectors[0] @ vectors[1] == pytest.approx(0.7553, abs=2e-4)
    assert vectors[0] @ vectors[2] == pytest.approx(-0.1050, abs=2e-4)


def test_a_text_has_the_same_vector_whatever_it_is_batched_with() -> None:
    alone = embed(["seat of a booking"])[0]
    among = embed(["x " * 90, "seat of a booking", "y", "z", "w", "v"])[1]
    np.testing.assert_allclose(alone, among, atol=1e-5)


def test_bands_follow_the_thresholds() -> None:
    assert bands_by_threshold(np.array([0.9, 0.86, 0.85, 0.4, 0.39])) == ["high", "high", "medium", "medium", "low"]
    chosen = band_distractors([FEE], POOL, random.Random(0), {"high": 1, "medium": 1, "low": 2})
    bands = {d.name: d.band for d in chosen}
    assert bands["baggage_fee"] == "high"
    assert bands["boil_egg"] == bands["moon_phase"] == "low"
    assert "bag_fee" not in bands
    assert all((d.similarity > 0.85) == (d.band == "high") for d in chosen)


def test_each_is_measured_against_its_closest_true_tool() -> None:
    other = tool("phase", "Phase of the moon on a day.", "day")
    alone, both = (similarities(true, POOL, embed) for true in ([FEE], [FEE, other]))
    assert both[3] > alone[3]
    assert both[0] == pytest.approx(alone[0], abs=1e-5)


CHINESE = [
    tool(f"工具{i}", text, "店")
    for i, text in enumerate(["查询门店库存数量", "查询门店地址", "计算两数之和", "播放音乐", "天气预报", "翻译文字"])
]


def test_chinese_uses_character_ngrams_cut_by_quantile() -> None:
    true = [tool("stock", "查询门店库存", "店")]
    chosen = band_distractors(true, CHINESE, random.Random(1), {"high": 1, "medium": 1, "low": 2}, "zh")
    assert {d.name: d.band for d in chosen}["工具0"] == "high"
    assert {d.band for d in chosen} == {"high", "medium", "low"}
    assert bands_by_quantile(np.array([])) == []
    vectors = ngram_vectors(["查询门店", "查询门店库存", "天气"])
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] == 0


def test_without_the_embedding_english_falls_back_to_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise EmbeddingUnavailable("not installed")

    monkeypatch.setattr(distractors, "embed", missing)
    chosen = band_distractors([FEE], POOL, random.Random(0), {"high": 1, "low": 1})
    assert chosen[0].name == "baggage_fee"


def test_draws_are_seeded_and_a_short_band_is_filled_from_below() -> None:
    counts = {"high": 3, "medium": 0, "low": 0}
    one, two = (band_distractors([FEE], POOL, random.Random(7), counts) for _ in range(2))
    assert one == two
    assert len(one) == 3
    assert band_distractors([FEE], [], random.Random(0)) == []
