"""The nano policy: its tokenizer, its first weights, its committed base, and what it is trained on."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import head_weights, hidden
from jax_train.nano import corpus
from jax_train.nano.base import BaseRecipe, make_base, write_config, write_tokenizer
from jax_train.nano.init import init_copying
from serving.render import Renderer

NANO = Path(__file__).resolve().parents[1] / "astrolabe" / "data" / "nano"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer and config by the recipe, from few texts."""
    folder = tmp_path_factory.mktemp("nano")
    knowledge = folder / "knowledge.jsonl"
    knowledge.write_text(json.dumps({"domain": "d", "text": "Mira Sol is a pilot.", "language": "en"}) + "\n")
    recipe = BaseRecipe(vocab_size=700)
    write_config(recipe, folder, write_tokenizer(recipe, folder, [knowledge]))
    return folder


def test_a_word_is_the_same_token_in_a_tool_name_and_in_a_question(folder):
    renderer = Renderer.from_folder(folder)
    inside, alone = renderer.encode_plain("wing_span"), renderer.encode_plain("the wing span")
    word = renderer.encode_plain("wing")
    assert inside[: len(word)] == word
    assert any(alone[i : i + len(word)] == word for i in range(len(alone)))


def test_digits_are_single_tokens(folder):
    renderer = Renderer.from_folder(folder)
    assert [renderer.decode([i]) for i in renderer.encode_plain("4471")] == list("4471")


def test_template_fragments_shorten_the_prompt_and_never_come_from_text(folder):
    renderer = Renderer.from_folder(folder)
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Finds it.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    header = '\n{"type": "function", "function": {"name": "'
    ids = renderer.prompt_ids([{"role": "user", "content": header}], [tool])
    assert len(ids) < 100
    fragment = renderer.tokenizer.added[header]
    assert ids.count(fragment) == 1  # the template's own; the user's text spells it out


def test_first_weights_continue_a_repetition(folder):
    """After `A B ... A` the untrained policy says B, for tokens drawn at random."""
    config = ModelConfig.from_hf(folder)
    params = jax.tree.map(jnp.asarray, init_copying(config, 0))
    rng = np.random.default_rng(1)
    right = total = 0
    forward = jax.jit(lambda ids: hidden(params, config, ids, jnp.arange(160)[None], jnp.ones((1, 160), jnp.int32)))
    for _ in range(3):
        once = rng.permutation(config.vocab_size)[:80]
        ids = np.concatenate([once, once])[None].astype(np.int32)
        guess = np.asarray((forward(ids)[0] @ head_weights(params).T).argmax(-1))
        right += (guess[81:159] == ids[0, 82:160]).sum()
        total += 78
    assert right / total > 0.5


def test_episodes_are_right_and_the_seed_repeats_them(folder):
    renderer = Renderer.from_folder(folder)
    words = corpus.Words.of(["pilot", "plane", "stone", "Mira", "Sol", "Bay"])
    first = [s.tokens.tolist() for s in itertools.islice(corpus.samples(renderer, words, 5, max_len=2000), 4)]
    again = [s.tokens.tolist() for s in itertools.islice(corpus.samples(renderer, words, 5, max_len=2000), 4)]
    assert first == again
    for environment in itertools.islice(corpus.environments(random.Random(0), 6, words), 10):
        shown = corpus.episode(environment, random.Random(0), 1.0)
        called = [c.function.name for m in shown.messages for c in m.tool_calls or []]
        assert set(called) == {g.tool for g in environment.goldens}
        assert len(called) >= len(environment.goldens)


def test_the_base_recipe_runs_whole_and_repeats_itself(tmp_path):
    """`make nano-base` at a small size, twice."""
    knowledge = tmp_path / "knowledge.jsonl"
    knowledge.write_text(json.dumps({"domain": "d", "text": "Mira Sol is a pilot.", "language": "en"}) + "\n")
    small = {"vocab_size": 500, "hidden_size": 80, "intermediate_size": 32, "layers": 2, "heads": 2, "head_dim": 16}
    recipe = {**small, "episodes": 8, "rows": 1, "budget": 2048, "steps": 2, "warmup": 1}
    said: list[str] = []
    first = make_base(BaseRecipe(**recipe), tmp_path / "first", [knowledge], said.append)
    second = make_base(BaseRecipe(**recipe), tmp_path / "second", [knowledge], said.append)
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    losses = [float(line.split("held-out ")[1].split()[0]) for line in said if "held-out" in line]
    assert len(losses) == 2
    assert np.isfinite(losses).all()


def test_the_committed_base_is_small_and_loads():
    files = list(NANO.iterdir())
    assert sum(f.stat().st_size for f in files) <= 8 * 1024 * 1024
    config = ModelConfig.from_hf(NANO)
    assert Renderer.from_folder(NANO).vocab_size <= config.vocab_size
