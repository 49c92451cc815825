"""Runs the environment graph over knowledge, into a run folder: a few samples per row, one graph invocation each.

Without a file the project's own knowledge is used, English and Chinese in turn. A line that is no knowledge row is a
rejected row, named on stderr; the run goes on and ends with code 3.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from astrolabe.records.base import Usage
from astrolabe.records.card import KnowledgeRow, read_knowledge
from astrolabe.records.errors import EXIT_PARTIAL, UsageError
from astrolabe.records.jsonl import parse_json, read_lines
from graphs.batch import Item, Outcome, run_batch
from graphs.environment_context import EnvironmentContext
from graphs.environment_graph import build, graph, prompt_hashes
from graphs.options import SynthOptions
from graphs.session import Session, file_hash, open_session

OWN = Path(__file__).parents[1] / "astrolabe" / "data" / "knowledge"
SAMPLES = 2
"""Samples per knowledge row."""

__all__ = ["KnowledgeSample", "build", "graph", "read_samples", "synthesise_environments"]


@dataclass(frozen=True)
class KnowledgeSample:
    """One sample to make: a row with the number of the sample, or why the line is no row."""

    row: KnowledgeRow | None
    variation: int = 0
    error: str | None = None
    text: str = ""
    """The line as it stands, where it is no row."""


def own_knowledge() -> list[Path]:
    """The files that the project ships."""
    return [OWN / "en.jsonl", OWN / "zh.jsonl"]


def _read(path: Path) -> list[KnowledgeSample]:
    out = []
    for number, text in read_lines(path):
        try:
            out.append(KnowledgeSample(read_knowledge(parse_json(text))))
        except ValueError as error:
            out.append(KnowledgeSample(None, error=f"{path.name}, line {number}: {error}", text=text))
    return out


def read_samples(knowledge: Path | None, samples: int = SAMPLES) -> list[Item[KnowledgeSample]]:
    """The items: every row once, then every row again, `samples` times, so that a limit still meets many domains. Of the
    project's own knowledge two English rows go before each Chinese one. UsageError if the file cannot be read."""
    if knowledge is not None:
        rows = _read(knowledge)
    else:
        english, chinese = map(_read, own_knowledge())
        pairs = [english[i : i + 2] for i in range(0, len(english), 2)]
        rows = [
            row for pair, other in zip_longest(pairs, chinese) for row in [*(pair or []), *([other] if other else [])]
        ]
    items: list[Item[KnowledgeSample]] = []
    seen: defaultdict[str, int] = defaultdict(int)
    for variation in range(samples):
        for number, sample in enumerate(rows, 1):
            if sample.row is None:
                if variation == 0:
                    items.append(Item(f"line {number}", sample))
                continue
            name = f"{sample.row.domain}/{sample.row.content_id()[3:11]}/{variation}"
            seen[name] += 1
            key = name if seen[name] == 1 else f"{name}#{seen[name]}"
            items.append(Item(key, KnowledgeSample(sample.row, variation)))
    return items


async def _work(item: Item[KnowledgeSample], ctx: EnvironmentContext) -> Outcome:
    sample = item.value
    if sample.row is None:
        bad: dict[str, Any] = {
            "item": item.key,
            "stage": "collect",
            "reasons": ["not_knowledge"],
            "detail": sample.error,
            "row": {"line": sample.text},
        }
        return Outcome(rejected=[bad], funnel=[("collect", 1, 0, {"not_knowledge": 1})])
    start = {"row": sample.row.to_json(), "key": item.key, "variation": sample.variation}
    state = await graph.ainvoke(start, context=ctx)
    accepted = state.get("accepted", [])
    return Outcome(
        rows={"environments": accepted},
        rejected=state.get("rejected", []),
        funnel=[("collect", 1, 1, {}), *state.get("funnel", [])],
        timings=[{"id": row["id"]} for row in accepted],
        usage=state.get("usage") or Usage(),
        judge_audit=state.get("audit"),
    )


def synthesise_environments(knowledge: Path | None, out: Path, options: SynthOptions, *, samples: int = SAMPLES) -> int:
    """Synthesise environments from a JSONL file of knowledge (None: the project's own) into the run folder `out`,
    `samples` of each row; returns the exit code (FORMATS).

    UsageError if the file is missing or empty, ServerError if a model server does not answer, RunError if `out` is another run.
    """
    everything = read_samples(knowledge, samples)
    if not everything:
        raise UsageError(
            f"{knowledge}: holds no knowledge", 'give a JSONL file with {"domain", "text", "language"} a line'
        )
    items = options.select(everything)
    unusable = [item.value.error for item in items if item.value.error]
    for text in unusable:
        print(text, file=sys.stderr)
    files = own_knowledge() if knowledge is None else [knowledge]
    inputs = {path.stem: file_hash(path) for path in files}
    with open_session(
        "synth environments", out, options, inputs=inputs, prompts=prompt_hashes(), files=["environments"]
    ) as session:
        code = asyncio.run(_run(items, session, texts_of(everything), own=knowledge is None))
    return code or (EXIT_PARTIAL if unusable else code)


def texts_of(items: list[Item[KnowledgeSample]]) -> dict[str, list[str]]:
    """language -> the texts of all rows, which lend each other distractors."""
    texts: dict[str, list[str]] = {}
    for item in items:
        if item.value.row is not None and item.value.variation == 0:
            texts.setdefault(item.value.row.language, []).append(item.value.row.text)
    return texts


async def _run(items: list[Item[KnowledgeSample]], session: Session, texts: dict[str, list[str]], *, own: bool) -> int:
    options = session.options
    ctx = EnvironmentContext(
        clients=session.context.clients,
        seed=options.seed,
        max_repairs=session.context.max_repairs,
        other_texts=texts,
        source="astrolabe knowledge" if own else "knowledge",
        license="CC0-1.0" if own else "LicenseRef-input",
    )
    try:
        report = await run_batch(
            items, lambda item: _work(item, ctx), session.store, concurrency=options.concurrency, what="samples"
        )
    finally:
        ctx.close()
    for client in ctx.clients.values():
        await client.aclose()
    return report.exit_code
