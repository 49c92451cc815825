"""Runs the trajectory graph over a file of server cards, into a run folder.

A line that is no JSON and a card that is not usable are rejected rows, named on stderr with their line; the run goes on
and ends with code 3.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from astrolabe.records.base import Usage
from astrolabe.records.card import CardReading, read_card
from astrolabe.records.errors import EXIT_PARTIAL, UsageError
from astrolabe.records.jsonl import parse_json, read_lines
from graphs.batch import Item, Outcome, run_batch
from graphs.options import SynthOptions
from graphs.session import Session, file_hash, open_session
from graphs.trajectory_context import TrajectoryContext
from graphs.trajectory_graph import graph, prompt_hashes


@dataclass(frozen=True)
class CardLine:
    """One line of the input: the row and what its validation found, or why there is no row."""

    where: str
    """`<file name>, line <n>`."""
    row: Any = None
    reading: CardReading | None = None
    error: str | None = None
    text: str = ""
    """The line as it stands, where there is no row."""

    def complaint(self, key: str) -> str | None:
        """One line with the mend, if the row cannot be used."""
        if self.error:
            return f"{self.error} (one JSON object per line)"
        if self.reading is not None and self.reading.reasons:
            return f"{self.where}: card {key!r} is rejected: {', '.join(self.reading.reasons)} (mend the card)"
        return None


def read_cards(path: Path) -> list[Item[CardLine]]:
    """The lines as items. A card's key is its name, or the first of `#2`, `#3`, ... after it that is free; a line without
    a name goes by its number. UsageError if the file cannot be read."""
    items: list[Item[CardLine]] = []
    taken: set[str] = set()
    for number, text in read_lines(path):
        where = f"{path.name}, line {number}"
        try:
            line = CardLine(where, parse_json(text))
        except ValueError as error:
            line = CardLine(where, error=f"{where}: not JSON: {error}", text=text)
        name = line.row.get("name") if isinstance(line.row, dict) else None
        key = plain = name.strip() if isinstance(name, str) and name.strip() else f"line {number}"
        again = 1
        while key in taken:
            again += 1
            key = f"{plain}#{again}"
        taken.add(key)
        items.append(Item(key, line))
    return items


def _read(line: CardLine, min_tools: int) -> CardLine:
    return line if line.error else replace(line, reading=read_card(line.row, min_tools=min_tools))


async def _work(item: Item[CardLine], ctx: TrajectoryContext) -> Outcome:
    line = item.value
    if line.error is not None:
        bad: dict[str, Any] = {"item": item.key, "stage": "collect", "reasons": ["not_json"], "detail": line.error}
        return Outcome(rejected=[bad | {"row": {"line": line.text}}], funnel=[("collect", 1, 0, {"not_json": 1})])
    state = await graph.ainvoke({"row": line.row, "key": item.key, "reading": line.reading}, context=ctx)
    return Outcome(
        rows={"trajectories": state.get("accepted", [])},
        rejected=state.get("rejected", []),
        funnel=state.get("funnel", []),
        timings=state.get("timings", []),
        usage=state.get("usage") or Usage(),
        judge_audit=state.get("audit"),
    )


def synthesise_trajectories(servers: Path, out: Path, options: SynthOptions) -> int:
    """Synthesise trajectories for the cards of a JSONL file into the run folder `out`; returns the exit code (FORMATS).

    UsageError if the file is missing or empty, ServerError if a model server does not answer, RunError if `out` is another run.
    """
    cards = read_cards(servers)
    if not cards:
        raise UsageError(f"{servers}: holds no server card", "give a JSONL file with a card a line")
    items = [replace(item, value=_read(item.value, options.min_tools)) for item in options.select(cards)]
    unusable = [text for item in items if (text := item.value.complaint(item.key))]
    for text in unusable:
        print(text, file=sys.stderr)
    inputs = {"servers": file_hash(servers)}
    with open_session(
        "synth trajectories", out, options, inputs=inputs, prompts=prompt_hashes(), files=["trajectories"]
    ) as session:
        code = asyncio.run(_run(items, session))
    return code or (EXIT_PARTIAL if unusable else code)


async def _run(items: list[Item[CardLine]], session: Session) -> int:
    options = session.options
    ctx = TrajectoryContext(
        clients=session.context.clients,
        seed=options.seed,
        min_tools=options.min_tools,
        max_repairs=session.context.max_repairs,
    )
    report = await run_batch(
        items, lambda item: _work(item, ctx), session.store, concurrency=options.concurrency, what="cards"
    )
    for client in ctx.clients.values():
        await client.aclose()
    return report.exit_code
