"""Drills for the base: many questions over one set of made-up tools, each answered by the names of its calls alone.

An episode of 300 tokens holds two or three choices of a tool; a drill holds one in 25. What is learnt in them is what
to call, and in which order: "the A of the B of X" is B, then A. The same phrases come in every order, so that the order
can be read from the question only. Copying arguments and values is left to the episodes (`corpus.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agents.teacher.codegen import NAME_FORMS, OP_NAMES
from agents.teacher.lexicon import identifier
from agents.teacher.questions import OPS, Compare, Lookup, Op, OpName, Query, render
from agents.teacher.random_worlds import code
from astrolabe.records.messages import FunctionSchema, ToolSchema
from jax_train.nano.corpus import Words
from jax_train.packing import Sample
from serving.render import Renderer

NUMBERED: tuple[OpName, ...] = ("sum", "difference", "product")
"""What a question asks to be done with a number of its own."""


@dataclass(frozen=True)
class Drill:
    """One set of tools: what each phrase and each operation is called."""

    lookups: dict[str, str]
    operations: dict[OpName, str]
    changes: dict[str, tuple[str, ...]]
    """Phrase -> the tools of a question that changes it."""
    owner: str

    @property
    def tools(self) -> list[ToolSchema]:
        schema = {"type": "object", "properties": {self.owner: {"type": "string"}}, "required": [self.owner]}
        names = [*self.lookups.values(), *self.operations.values(), *itertools.chain(*self.changes.values())]
        return [ToolSchema(function=FunctionSchema(name=name, description="", parameters=schema)) for name in names]


def entity(words: Words, rng: random.Random) -> str:
    """What a question is about: a name or a code."""
    return code(rng) if rng.random() < 0.3 else words.name(rng)


def make_drill(words: Words, rng: random.Random) -> Drill:
    """Three to seven phrases of one or two words, some of them near variants of another, and up to two operations."""
    phrases: list[str] = []
    count = rng.randint(3, 7)
    last = [words.word(rng) for _ in range(3)]
    while len(phrases) < count:
        if phrases and rng.random() < 0.15:
            phrase = f"{words.word(rng)} {rng.choice(phrases)}"
        else:
            phrase = f"{words.word(rng)} {rng.choice(last) if rng.random() < 0.3 else words.word(rng)}"
        if phrase not in phrases:
            phrases.append(phrase)
    form = rng.choice(NAME_FORMS)
    operations = rng.sample(OPS, rng.choice((0, 1, 1, 2)))
    lookups = {phrase: form.format(identifier(phrase)) for phrase in phrases}
    changes = {}
    if rng.random() < 0.3:
        phrase = f"{words.word(rng)} {words.word(rng)}"
        verbs = rng.choice((("change",), ("move", "present")))
        changes[phrase] = tuple(f"{verb}_{identifier(phrase)}" for verb in verbs)
    return Drill(lookups, {op: rng.choice(OP_NAMES[op]) for op in operations}, changes, words.word(rng))


def _change(drill: Drill, words: Words, rng: random.Random) -> tuple[str, list[str]]:
    """A question that changes state, as `agents.teacher.stateful` asks it."""
    phrase, calls = rng.choice(sorted(drill.changes.items()))
    first, second, number = entity(words, rng), entity(words, rng), rng.randint(2, 989)
    if len(calls) == 1:
        text = f"Change the {phrase} of {first} to {number}, and say what it was before."
    else:
        text = f"Move {number} of the {phrase} from {first} to {second}, then tell me the {phrase} of {second}."
    return text, list(calls)


def question(drill: Drill, words: Words, rng: random.Random) -> tuple[str, list[str]]:
    """A question and the tools that answer it, in order."""
    if drill.changes and rng.random() < 0.2:
        return _change(drill, words, rng)
    phrases = rng.sample(sorted(drill.lookups), rng.randint(1, min(4, len(drill.lookups))))

    def chain(names: list[str], root: str) -> Lookup:
        out: Lookup | str = root
        for name in names:
            out = Lookup(name, out)
        assert isinstance(out, Lookup)
        return out

    calls = [drill.lookups[phrase] for phrase in phrases]
    form = rng.random()
    query: Query = chain(phrases, entity(words, rng))
    if form < 0.3 and drill.operations:
        op = rng.choice(sorted(drill.operations))
        if op in NUMBERED and rng.random() < 0.5:
            query, calls = Op(op, query, rng.randint(3, 19)), [*calls, drill.operations[op]]
        else:
            others = rng.sample(sorted(drill.lookups), rng.randint(1, 2))
            query = Op(op, query, chain(others, entity(words, rng)))
            calls = [*calls, *(drill.lookups[phrase] for phrase in others), drill.operations[op]]
    elif form < 0.45:
        *way, last = phrases
        sides = [chain(way, entity(words, rng)) if way else entity(words, rng) for _ in range(2)]
        query, calls = Compare(last, sides[0], sides[1]), calls * 2
    return render(query, "en", rng), calls


def drill_sample(renderer: Renderer, drill: Drill, words: Words, rng: random.Random, budget: int) -> Sample:
    """As many questions as `budget` tokens hold (at least one), each with its calls; the names and the ends of turns are trained."""
    opening = renderer.encode('<tool_call>\n{"name": "')
    closing = renderer.encode('", "arguments": }\n</tool_call>')
    end = renderer.encode("<|im_end|>")
    ask, reply = renderer.encode("\n<|im_start|>user\n"), renderer.encode("\n<|im_start|>assistant\n<think>\n\n</think>\n\n")  # fmt: skip
    first, calls = question(drill, words, rng)
    tokens = renderer.prompt_ids([{"role": "user", "content": first}], drill.tools)
    mask = [0] * len(tokens)
    kept = 0
    while True:
        for name in calls:
            text = renderer.encode_plain(name)
            tokens += [*opening, *text, *closing]
            mask += [1] * len(opening) + [1] * len(text) + [1] + [0] * (len(closing) - 1)
        tokens, mask = [*tokens, *end], [*mask, 1]
        if kept and len(tokens) > budget:
            break
        kept = len(tokens)
        text_of, calls = question(drill, words, rng)
        asked = [*ask, *renderer.encode_plain(text_of), *end, *reply]
        tokens, mask = [*tokens, *asked], [*mask, *([0] * len(asked))]
        if rng.random() < 0.15:
            break
    return Sample(tokens=np.asarray(tokens[:kept], np.int32), mask=np.asarray(mask[:kept], np.int8))


def drills(renderer: Renderer, words: Words, seed: int, budget: int) -> Iterator[Sample]:
    """Token rows of at most `budget` tokens, for ever."""
    rng = random.Random(seed)
    while True:
        sample = drill_sample(renderer, make_drill(words, rng), words, rng, budget)
        if len(sample) <= budget:
            yield sample
