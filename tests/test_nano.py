"""The nano policy: its tokenizer, its first weights, its committed base, and what it is trained on."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from agents.teacher.environments import stateful_environment
from agents.teacher.questions import Compare, Lookup, parse
from agents.teacher.random_worlds import default_vocabulary, random_world
from astrolabe.envs.gates.check import check_environments
from astrolabe.envs.sandbox import Sandbox
from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import head_weights, hidden
from jax_train.nano import corpus, drill
from jax_train.nano.base import BaseRecipe, make_base, write_config, write_tokenizer
from jax_train.nano.init import TYPES, embeddings, init_copying
from serving.render import Renderer

NANO = Path(__file__).resolve().parents[1] / "astrolabe" / "data" / "nano"


LOWER = tuple(
    [
        "pilot",
        "plane",
        "stone",
        "wing",
        "span",
        "fuel",
        "road",
        "crane",
        "loom",
        "mill",
        "bridge",
        "tower",
        "garden",
        "vault",
        "clinic",
        "novel",
        "tune",
        "ledger",
    ]
)
WORDS = corpus.Words(LOWER, (*LOWER, "ing", "er"), ("Mira", "Sol", "Bay"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer and config by the recipe, from few texts."""
    folder = tmp_path_factory.mktemp("nano")
    knowledge = folder / "knowledge.jsonl"
    knowledge.write_text(json.dumps({"domain": "d", "text": "Mira Sol is a pilot.", "language": "en"}) + "\n")
    recipe = BaseRecipe(vocab_size=700)
    write_config(recipe, folder, write_tokenizer(recipe, folder, [knowledge]))
    return folder


def test_words_are_neighbours_in_a_tool_name_and_in_a_question(folder):
    """A space or an underscore is no token of its own where a word follows."""
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(
        "get_plane, the plane", add_special_tokens=False
    )
    assert {"Ġ", "_"} < {token[0] for token in tokens.tokens}
    assert {"_", "Ġ"}.isdisjoint(tokens.tokens)


def test_a_word_is_the_same_however_it_is_written():
    rows = embeddings(["Ġwing", "_wing", "wing", "Wing", "Ġspan", ",", "Ġ"], 40, np.random.default_rng(0))
    content, kind = rows[:, :-TYPES], rows[:, -TYPES:]
    assert all((content[0] == content[i]).all() for i in (1, 2, 3))
    assert not (content[0] == content[4]).all()
    assert (kind[0] == kind[4]).all()
    assert not (kind[0] == kind[1]).all()
    assert not (kind[2] == kind[3]).all()
    assert not (content[5] == content[6]).all()


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
    params = jax.tree.map(jnp.asarray, init_copying(config, 0, [f"t{i}" for i in range(config.vocab_size)]))
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
    first = [s.tokens.tolist() for s in itertools.islice(corpus.samples(renderer, WORDS, 5, max_len=2000), 4)]
    again = [s.tokens.tolist() for s in itertools.islice(corpus.samples(renderer, WORDS, 5, max_len=2000), 4)]
    assert first == again
    made = list(itertools.islice(corpus.environments(random.Random(0), 6, WORDS), 40))
    assert {environment.mode for environment in made} == {"stateless", "stateful"}
    for environment in made:
        shown = corpus.episode(environment, random.Random(0), 1.0)
        called = [c.function.name for m in shown.messages for c in m.tool_calls or []]
        assert set(called) == {g.tool for g in environment.goldens}
        assert len(called) >= len(environment.goldens)


def test_made_up_stateful_environments_pass_their_own_goldens():
    """The goldens, called in order, return what they say and reach the goal."""
    world = random_world(random.Random(3), "en", default_vocabulary("en"))
    made = [e for e in (stateful_environment(world, random.Random(i)) for i in range(6)) if e is not None]
    assert made
    with Sandbox() as sandbox:
        for report in check_environments(made, sandbox):
            assert report.verdict == "pass", report.to_json()


def test_words_of_a_vocabulary():
    words = corpus.Words.of(["Ġwing", "_wing", "Ġthe", "_the", "ing", "Mira", "Ġ", "9", "Ġlong"])
    assert words.lower == ("wing",)
    assert set(words.pieces) == {"ing", "long", "the", "wing"}
    assert words.capital == ("Mira",)


def test_drills_answer_from_the_inside_out():
    lookups = {"wing span": "get_wing_span", "red plane": "get_red_plane", "home town": "get_home_town"}
    made = drill.Drill(lookups, {"sum": "add"}, {}, "pilot")
    rng = random.Random(0)
    for _ in range(200):
        text, calls = drill.question(made, WORDS, rng)
        query = parse(text, "en")
        assert query is not None, text
        assert calls == [lookups.get(name, name) for name in order_of(query)], text


def order_of(query) -> list[str]:
    """Phrases and operations of a query in the order of their calls, read from its tree."""
    if isinstance(query, Lookup):
        return [*(order_of(query.subject) if isinstance(query.subject, Lookup) else []), query.phrase]
    if isinstance(query, Compare):
        return [name for side in query.sides for name in order_of(side)]
    assert query.op == "sum"
    return [*order_of(query.left), *([] if isinstance(query.right, int) else order_of(query.right)), "add"]


def test_drills_train_names_and_ends_only_and_the_seed_repeats_them(folder):
    renderer = Renderer.from_folder(folder)
    rows = list(itertools.islice(drill.drills(renderer, WORDS, 3, 900), 5))
    again = list(itertools.islice(drill.drills(renderer, WORDS, 3, 900), 5))
    for row, other in zip(rows, again, strict=True):
        assert row.tokens.tolist() == other.tokens.tolist()
        assert len(row) <= 900
        trained = renderer.decode(row.tokens[row.mask == 1].tolist())
        assert set(re.sub(r'<tool_call>\n\{"name": "\w+", "arguments": |<\|im_end\|>', "", trained)) == set()
        assert trained.startswith('<tool_call>\n{"name": "')
        assert trained.endswith("<|im_end|>")


def test_the_base_recipe_runs_whole_and_repeats_itself(tmp_path):
    """`make nano-base` at a small size, twice."""
    knowledge = tmp_path / "knowledge.jsonl"
    knowledge.write_text(json.dumps({"domain": "d", "text": "Mira Sol is a pilot.", "language": "en"}) + "\n")
    small = {"vocab_size": 500, "hidden_size": 80, "intermediate_size": 32, "layers": 2, "heads": 2, "head_dim": 16}
    recipe = {**small, "tokens": 2048, "budget": 2048, "steps": 2, "warmup": 1, "log_every": 1}
    said: list[str] = []
    first = make_base(BaseRecipe(**recipe), tmp_path / "first", [knowledge], said.append)
    second = make_base(BaseRecipe(**recipe), tmp_path / "second", [knowledge], said.append)
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    losses = [float(x) for line in said for x in re.findall(r"held-out ([\d.]+)", line)]
    assert len(losses) == 8
    assert np.isfinite(losses).all()


def test_the_committed_base_is_small_and_loads():
    files = list(NANO.iterdir())
    assert sum(f.stat().st_size for f in files) <= 8 * 1024 * 1024
    config = ModelConfig.from_hf(NANO)
    assert Renderer.from_folder(NANO).vocab_size <= config.vocab_size
