"""Training episodes for the base: endless, about made-up worlds, from the teacher's own programs.

Nothing of the project's knowledge is in them: names, attributes and tools are drawn anew for each world, so what can
be learned is how to read tools, copy values and chain calls. Like the teacher's, the episodes are right but not always
the shortest: some look the same thing up again.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from agents.teacher.environments import build_environments, final_text
from agents.teacher.random_worlds import Vocabulary, default_vocabulary, random_knowledge, random_world
from agents.teacher.texts import write_text
from astrolabe.envs.executor import observation
from astrolabe.records.card import KnowledgeRow
from astrolabe.records.environment import Environment, Golden
from astrolabe.records.messages import FunctionCall, Message, ToolCall
from astrolabe.records.trajectory import Task, Trajectory
from jax_train.data import sft_sample
from jax_train.packing import Sample
from serving.render import Renderer

GRAMMAR = frozenset(["and", "are", "for", "has", "its", "minus", "of", "or", "plus", "that", "the", "times", "was", "what", "which", "with"])  # fmt: skip
"""Words of the questions' own grammar, which no made-up name is made of."""
PER_WORLD = 6
"""Environments that one made-up world is asked for."""
STATEFUL = 0.12
"""Share of them that change state."""


@dataclass(frozen=True)
class Words:
    """What words are made of, so that each is met in every role."""

    lower: tuple[str, ...]
    """Words that are one token in a question and in a tool's name."""
    pieces: tuple[str, ...]
    """All alphabetic tokens in lower case."""
    capital: tuple[str, ...]
    whole: float = 0.85
    """Share of words that are out of `lower`."""

    @classmethod
    def of(cls, vocabulary: Iterable[str]) -> Words:
        """From byte-level tokens, "Ġ" for a space."""
        known = set(vocabulary)
        plain = sorted({w.lstrip("Ġ_") for w in known})
        plain = [w for w in plain if w.isascii() and w.isalpha() and 2 <= len(w) <= 12]
        pieces = tuple(w for w in plain if w.islower())
        lower = tuple(w for w in pieces if len(w) > 2 and w not in GRAMMAR and {f"Ġ{w}", f"_{w}"} <= known)
        return cls(lower or pieces, pieces, tuple(w for w in plain if w.istitle()))

    def word(self, rng: random.Random) -> str:
        """A word: mostly a whole token, else one or two pieces."""
        if rng.random() < self.whole:
            return rng.choice(self.lower)
        return "".join(rng.choice(self.pieces) for _ in range(rng.choice((1, 2))))

    def noun(self, rng: random.Random) -> str:
        """A word that the texts' grammar can put into the plural and behind an article."""
        while True:
            text = self.word(rng)
            if len(text) > 2 and text[-1] not in "shxzyf":
                return text

    def vocabulary(self, rng: random.Random) -> Vocabulary:
        """A vocabulary of one world: its nouns and qualifiers are such words."""
        base = default_vocabulary("en")

        def words(count: int) -> tuple[str, ...]:
            return tuple(dict.fromkeys(self.noun(rng) for _ in range(count)))

        return replace(base, kinds=words(8), qualifiers=words(16), links=(*base.links[:3], *words(6)), invented=0.1)

    def name(self, rng: random.Random) -> str:
        """A name of one or two capitalised words."""

        def word() -> str:
            text = rng.choice(self.capital)
            return text + rng.choice(self.pieces) if len(text) < 3 or rng.random() < 0.2 else text

        return " ".join(word() for _ in range(rng.choice((1, 2, 2))))


def made_up_row(rng: random.Random, words: Words | None) -> KnowledgeRow:
    """A knowledge row about a made-up world; with `words`, out of all of the tokenizer's pieces."""
    if words is None:
        return random_knowledge(rng, "en")
    world = random_world(rng, "en", words.vocabulary(rng))
    text = write_text(world, rng)
    for members in world.types.values():
        for old in members:
            if not any(c.isdigit() for c in old):
                text = re.sub(rf"\b{re.escape(old)}\b", words.name(rng), text)
    return KnowledgeRow(domain=world.domain, text=text, language="en")


def environments(rng: random.Random, max_nodes: int, words: Words | None = None) -> Iterator[Environment]:
    """English environments of at most `max_nodes` nodes over made-up worlds, for ever."""
    while True:
        row = made_up_row(rng, words)
        for environment in build_environments(row, rng, PER_WORLD, stateful=STATEFUL):
            if len(environment.nodes) <= max_nodes:
                yield environment


def episode(environment: Environment, rng: random.Random, redundancy: float) -> Trajectory:
    """The golden calls in order, one a turn, and the answer; with probability `redundancy`, one to three of them made
    again on the way."""
    calls: list[Golden] = list(environment.goldens)
    if calls and rng.random() < redundancy:
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(1, len(calls))
            calls.insert(at, rng.choice(calls[:at]))
    messages = [Message(role="user", content=environment.question)]
    for number, golden in enumerate(calls, 1):
        arguments = json.dumps(golden.arguments, ensure_ascii=False)
        call = ToolCall(id=f"call_{number}", function=FunctionCall(name=golden.tool, arguments=arguments))
        messages.append(Message(role="assistant", tool_calls=[call]))
        messages.append(Message(role="tool", content=observation(golden.returns), tool_call_id=call.id))
    messages.append(
        Message(role="assistant", content=final_text(environment.expect, environment.answer, environment.language))
    )
    return Trajectory(task=Task(question=environment.question), messages=messages, tools=environment.policy_tools())


def samples(
    renderer: Renderer, words: Words, seed: int, *, max_nodes: int = 6, redundancy: float = 0.3, max_len: int = 512
) -> Iterator[Sample]:
    """Token rows of at most `max_len` tokens, for ever; the assistant's turns are trained."""
    rng = random.Random(seed)
    for environment in environments(rng, max_nodes, words):
        sample = sft_sample(episode(environment, rng, redundancy), renderer)
        if len(sample) <= max_len:
            yield sample


def texts(seed: int, count: int) -> Iterator[str]:
    """The words of `count` made-up environments, as the plain encoder will meet them: for the tokenizer."""
    rng = random.Random(seed)
    for environment in itertools.islice(environments(rng, 99), count):
        yield environment.question
        yield final_text(environment.expect, environment.answer, environment.language)
        for tool in environment.policy_tools():
            yield from (tool.function.name, tool.function.description, *tool.function.parameters["properties"])
        for golden in environment.goldens:
            yield json.dumps(golden.arguments, ensure_ascii=False)
            yield observation(golden.returns)
