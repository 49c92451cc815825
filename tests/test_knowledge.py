"""The project's knowledge: made again from its domain files, read back to the same facts, in two languages."""

from __future__ import annotations

import json
import random

import pytest

from agents.teacher.lexicon import WORDS, identifier
from agents.teacher.make_knowledge import FOLDER, knowledge_rows, read_domains
from agents.teacher.plans import lookups
from agents.teacher.questions import Compare, parse, render
from agents.teacher.random_worlds import default_vocabulary, random_knowledge, random_world
from agents.teacher.texts import write_text
from agents.teacher.worlds import Attribute, World, plural, read_world, singular
from astrolabe.records.card import KnowledgeRow, read_knowledge

LANGUAGES = ("en", "zh")


def facts(world: World) -> dict[str, tuple[object, ...]]:
    def shape(a: Attribute) -> tuple[object, ...]:
        return (a.owner, a.kind, a.target, a.unit, a.per, a.dimension, a.values)

    return {phrase: shape(attribute) for phrase, attribute in world.attributes.items()}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_shipped_knowledge_is_what_the_script_writes(language):
    shipped = (FOLDER / f"{language}.jsonl").read_text(encoding="utf-8")
    assert shipped == "".join(row.to_line() + "\n" for row in knowledge_rows(language))


def test_there_are_forty_english_and_twenty_chinese_domains_with_chains_of_relations():
    assert len(read_domains("en")) >= 40
    assert len(read_domains("zh")) >= 20
    depths = [max(lookup.depth for lookup in lookups(read_world(row))) for row in knowledge_rows("en")]
    assert min(depths) >= 2
    assert max(depths) >= 4


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_row_is_a_knowledge_row_whose_text_reads_back_to_several_attributes(language):
    for line in (FOLDER / f"{language}.jsonl").read_text(encoding="utf-8").splitlines():
        row = read_knowledge(json.loads(line))
        world = read_world(row)
        assert row.language == language
        assert len(world.types) >= 3
        assert len(world.attributes) >= 5
        assert any(a.kind == "relation" for a in world.attributes.values())


def test_phrases_are_told_apart_within_a_domain_and_chinese_words_have_an_english_name():
    for language in LANGUAGES:
        for domain in read_domains(language):
            phrases = [phrase for _, phrase, _ in domain.relations + domain.attributes]
            assert len(set(phrases)) == len(phrases)
            assert len({identifier(phrase) for phrase in phrases}) == len(phrases), domain.name
    assert all(word in WORDS for domain in read_domains("zh") for word in domain.english)
    assert identifier("没有登记的词").isidentifier()
    assert identifier("没有登记的词").isascii()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_world_survives_being_written_out_and_read_in(language, seed):
    world = random_world(random.Random(seed), language, default_vocabulary(language))
    row = KnowledgeRow(domain=world.domain, text=write_text(world, random.Random(seed)), language=language)
    assert facts(read_world(row)) == facts(world)


def test_random_knowledge_repeats_with_its_seed_and_differs_between_seeds():
    assert random_knowledge(random.Random(5), "en") == random_knowledge(random.Random(5), "en")
    assert random_knowledge(random.Random(5), "en") != random_knowledge(random.Random(6), "en")


def test_a_text_in_another_form_gives_a_world_without_facts():
    row = KnowledgeRow(domain="x", language="en", text="Known information: DOB 07/12/1990. Please call me back!")
    assert read_world(row).attributes == {}


@pytest.mark.parametrize("noun", ["pilot", "ferry", "class", "press", "branch", "box", "house", "course", "day"])
def test_singular_undoes_plural(noun):
    assert singular(plural(noun)) == noun


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_question_is_read_back_to_the_query_that_it_was_written_from(language):
    from agents.teacher.plans import sample_query

    rng = random.Random(2)
    read = 0
    for seed in range(25):
        world = read_world(random_knowledge(random.Random(seed), language))
        for shape in ("chain", "scaled", "pair", "compare"):
            query = sample_query(world, rng, hops=rng.randint(1, 4), shape=shape)
            if query is not None:
                assert parse(render(query, language, rng), language) == query
                read += 1
    assert read > 40


@pytest.mark.parametrize(
    ("text", "language"),
    [("Hello there", "en"), ("What is love?", "en"), ("你好", "zh"), ("今天天气怎么样？", "zh"), ("", "en")],
)
def test_a_question_of_another_grammar_is_not_read(text, language):
    assert parse(text, language) is None


def test_a_digit_at_an_entitys_end_does_not_join_a_quantity():
    query = parse("KL-207 3天的机库租金是多少？", "zh")
    assert query is not None
    assert not isinstance(query, Compare)
    assert query.subject == "KL-207"
    assert query.modifiers == (("天", 3),)
