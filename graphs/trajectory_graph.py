"""Trajectory synthesis: one server card in, judged tool-use trajectories out; one graph invocation per card.

propose -> walk -> vote -> write -> augment -> verify -> score -> rollout -> judge -> decide. Chains become a transition
graph and seeded walks over it; a walk must pass the static argument-flow check before a vote; tasks are read back before
they are played, played in the stateful emulator under seeded faults, and judged fail-closed. Whatever ends on the way is
a rejected row with its stage and reason codes, so that every stage of the funnel adds up.
"""

from __future__ import annotations

import asyncio
import operator
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from agents import planner, policy
from agents.base import Agent
from agents.emulator import emulate
from agents.judge import AGENTS as JUDGES
from agents.judge import judge_trajectory
from astrolabe.records.base import Usage
from astrolabe.records.card import CardReading, ServerCard, read_card
from astrolabe.records.funnel import FunnelEntry
from astrolabe.records.ids import rng_for, seed_for
from graphs import trajectory_tasks as tasks
from graphs.argument_flow import argument_gaps
from graphs.trajectory_context import TrajectoryContext
from graphs.trajectory_rollout import Played, decide, play
from graphs.trajectory_tasks import Draft
from graphs.transition import sample_walks, transition_graph


class TrajectoryInput(TypedDict, total=False):
    """One card."""

    row: dict[str, Any]
    """The raw card, as in the input file."""
    key: str
    """Its name in the run; default: the card's name."""
    reading: CardReading
    """The validated card, where the caller has read it already."""


class TrajectoryState(TrajectoryInput, total=False):
    card: ServerCard | None
    seed: int
    chains: list[list[str]]
    drafts: list[Draft]
    played: list[Played]
    accepted: list[dict[str, Any]]
    rejected: Annotated[list[dict[str, Any]], operator.add]
    funnel: Annotated[list[FunnelEntry], operator.add]
    timings: Annotated[list[dict[str, Any]], operator.add]
    usage: Annotated[Usage, operator.add]
    """All model calls of the card, those of rejected parts too."""
    audit: dict[str, Any]


def prompt_hashes() -> dict[str, str]:
    """agent -> hash of its prompt, for `run.json` and provenance."""
    agents: list[Agent[Any, Any]] = [*planner.AGENTS, emulate, *JUDGES]
    return {agent.name: agent.prompt_hash for agent in agents} | {"policy": policy.prompt_hash()}


def _rejection(key: str, stage: str, reasons: Sequence[str], detail: str, row: Any) -> dict[str, Any]:
    return {"item": key, "stage": stage, "reasons": list(dict.fromkeys(reasons)), "detail": detail[:2000], "row": row}


def _entry(stage: str, went_in: int, reasons: Sequence[Sequence[str]]) -> FunnelEntry:
    """A funnel entry; what has several reasons counts once, under its first, so that in = out + rejected."""
    counts = Counter(why[0] for why in reasons)
    return stage, went_in, went_in - len(reasons), dict(sorted(counts.items()))


def _end_drafts(key: str, stage: str, drafts: Sequence[Draft]) -> dict[str, Any]:
    """The update after a stage of drafts: the living go on, the ended become rejected rows."""
    ended = [d for d in drafts if d.reasons]
    return {
        "drafts": [d for d in drafts if not d.reasons],
        "rejected": [_rejection(key, stage, d.reasons, d.detail, d.task.to_json()) for d in ended],
        "funnel": [_entry(stage, len(drafts), [d.reasons for d in ended])],
        "usage": sum((d.usage for d in ended), Usage()),
    }


async def collect(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """The card, validated; dropped tools and rejected cards are rows with their reasons."""
    row = state["row"]
    reading = state.get("reading") or read_card(row, min_tools=runtime.context.min_tools)
    name = row.get("name") if isinstance(row, dict) and isinstance(row.get("name"), str) else "card"
    key: str = state.get("key") or str(name)
    rejected = []
    if reading.card is None:
        detail = "; ".join(f"{d['tool']}: {d['detail']}" for d in reading.dropped)
        rejected.append(_rejection(key, "collect", reading.reasons, detail, row))
    else:
        rejected += [
            _rejection(key, "collect", [d["reason"]], f"tool {d['tool']}: {d['detail']}", {"tool": d["tool"]})
            for d in reading.dropped
        ]
    return {
        "key": key,
        "card": reading.card,
        "seed": seed_for(runtime.context.seed, "trajectory", key, reading.card.content_id() if reading.card else ""),
        "rejected": rejected,
        "funnel": [_entry("collect", 1, [reading.reasons] if reading.card is None else [])],
        "usage": Usage(),
        "accepted": [],
    }


def _collected(state: TrajectoryState) -> str:
    return "propose" if state.get("card") else END


async def propose(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """Chains from the planner, walks over their transition graph, and the argument-flow check of each walk."""
    ctx, card, key = runtime.context, _card(state), state["key"]
    chains, reasons, usage, _ = await tasks.propose(card, ctx, seed=state["seed"])
    rejected, funnel = [], [_entry("propose", 1, [reasons] if reasons else [])]
    if reasons:
        rejected.append(_rejection(key, "propose", reasons, "", {"server": card.name}))
    documents = {tool.name: tool for tool in card.tools}
    for chain in chains:
        gaps = argument_gaps(chain, documents)
        if gaps:  # the chain itself; its sound edges may still be walked
            rejected.append(
                _rejection(key, "propose", [g.reason for g in gaps], "; ".join(map(str, gaps)), {"chain": chain})
            )
    graph, _ = transition_graph(chains, documents)
    rng = rng_for(state["seed"], "walks")
    walks = sample_walks(graph, rng, limit=ctx.walks, min_length=ctx.min_chain, max_length=ctx.max_chain)
    sound, broken = [], []
    for walk in walks:
        gaps = argument_gaps(walk, documents)
        if gaps:
            broken.append([g.reason for g in gaps])
            rejected.append(_rejection(key, "walk", broken[-1], "; ".join(map(str, gaps)), {"chain": walk}))
        else:
            sound.append(walk)
    funnel.append(_entry("walk", len(walks), broken))
    return {"chains": sound, "rejected": rejected, "funnel": funnel, "usage": usage}


async def vote(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """A quorum over each chain; the first that pass are kept, up to the number for which tasks are written."""
    ctx, card, walks = runtime.context, _card(state), state["chains"]
    votes = await asyncio.gather(
        *(tasks.vote(card, walk, ctx, seed=seed_for(state["seed"], "vote", n)) for n, walk in enumerate(walks))
    )
    kept: list[list[str]] = []
    reasons: list[list[str]] = []
    rejected: list[dict[str, Any]] = []
    for walk, (against, _, detail) in zip(walks, votes, strict=True):
        why = against or (["surplus"] if len(kept) >= ctx.chains else [])
        if why:
            reasons.append(why)
            rejected.append(_rejection(state["key"], "vote", why, detail, {"chain": walk}))
        else:
            kept.append(walk)
    return {
        "chains": kept,
        "rejected": rejected,
        "funnel": [_entry("vote", len(walks), reasons)],
        "usage": sum((v[1] for v in votes), Usage()),
    }


async def write(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """The original tasks; a second draft of one question is a duplicate."""
    ctx, card = runtime.context, _card(state)
    plans = tasks.plan_tasks(card, state["chains"], ctx, rng_for(state["seed"], "plans"))
    drafts = await asyncio.gather(
        *(
            tasks.write(card, plan, ctx, seed=seed_for(state["seed"], "task", n), item=f"{state['key']}/{n}")
            for n, plan in enumerate(plans)
        )
    )
    return _end_drafts(state["key"], "write", _without_twins(drafts))


def _without_twins(drafts: Sequence[Draft]) -> list[Draft]:
    seen: set[str] = set()
    out = []
    for draft in drafts:
        twin = not draft.reasons and draft.task.question in seen
        seen.add(draft.task.question)
        out.append(draft.ended(draft.stage, "duplicate_task") if twin else draft)
    return out


async def augment(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """Variations of a seeded share of the originals, which stay as they are."""
    ctx, card, originals = runtime.context, _card(state), state["drafts"]
    chosen: list[tuple[Draft, planner.AugmentMode, int]] = []
    for n, draft in enumerate(originals):
        rng: random.Random = rng_for(state["seed"], "augment", draft.task.id)
        if draft.task.kind == "answer" and rng.random() < ctx.augment_share:
            chosen.append((draft, tasks.MODES[(rng.randrange(3) + n) % 3], seed_for(state["seed"], "augment", n)))
    made = await asyncio.gather(*(tasks.augment(card, d, mode, ctx, seed=seed) for d, mode, seed in chosen))
    update = _end_drafts(state["key"], "augment", _without_twins([*originals, *made])[len(originals) :])
    return update | {"drafts": [*originals, *update["drafts"]]}


async def verify(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """Every task read back, originals and variations alike."""
    checked = await asyncio.gather(
        *(
            tasks.verify(_card(state), draft, runtime.context, seed=seed_for(state["seed"], "verify", draft.task.id))
            for draft in state["drafts"]
        )
    )
    return _end_drafts(state["key"], "verify", checked)


async def score(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """Every task rated against the thresholds."""
    rated = await asyncio.gather(
        *(
            tasks.rate(_card(state), draft, runtime.context, seed=seed_for(state["seed"], "score", draft.task.id))
            for draft in state["drafts"]
        )
    )
    return _end_drafts(state["key"], "score", rated)


async def rollout(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """Every task played once in the emulator."""
    ctx, card, prompts = runtime.context, _card(state), prompt_hashes()
    played = await asyncio.gather(
        *(
            play(card, draft, ctx, prompts, seed=seed_for(state["seed"], "rollout", draft.task.id))
            for draft in state["drafts"]
        )
    )
    ended = [p for p in played if p.reasons]
    return {
        "played": [p for p in played if not p.reasons],
        "rejected": [_rejection(state["key"], "rollout", p.reasons, p.detail, p.trajectory.to_json()) for p in ended],
        "funnel": [_entry("rollout", len(played), [p.reasons for p in ended])],
        "timings": [{"id": p.trajectory.id, "stage": "rollout", "seconds": round(p.seconds, 4)} for p in played],
        "usage": sum((p.usage for p in ended), Usage()),
    }


async def judge(state: TrajectoryState, runtime: Runtime[TrajectoryContext]) -> dict[str, Any]:
    """The seven judgements of each finished trajectory, and the decision. Nothing unjudged is accepted."""
    ctx = runtime.context
    judged = await asyncio.gather(
        *(
            judge_trajectory(p.trajectory, ctx, seed=seed_for(state["seed"], "judge", p.trajectory.task.id))
            for p in state["played"]
        )
    )
    accepted: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    reasons: list[list[str]] = []
    audit: dict[str, Counter[str]] = {}
    usage = Usage()
    for played, judgement in zip(state["played"], judged, strict=True):
        spent = played.usage + judgement.usage
        usage += spent
        verdicts = list(judgement.verdicts)
        for verdict in verdicts:
            audit.setdefault(verdict.judge, Counter())[verdict.verdict] += 1
        models = played.trajectory.provenance.models | {"judge": verdicts[0].model if verdicts else ""}
        provenance = played.trajectory.provenance.model_copy(
            update={"models": {role: model for role, model in sorted(models.items()) if model}, "usage": spent}
        )
        trajectory = played.trajectory.model_copy(
            update={"verdicts": verdicts, "score": judgement.score, "provenance": provenance}
        )
        why = decide(trajectory, ctx)
        if why:
            reasons.append(why)
            notes = "; ".join(f"{v.judge}: {v.reason}" for v in verdicts if v.verdict in ("fail", "unjudged"))
            rejected.append(_rejection(state["key"], "judge", why, notes, trajectory.to_json()))
        else:
            accepted.append(trajectory.to_json())
    return {
        "accepted": accepted,
        "rejected": rejected,
        "funnel": [_entry("judge", len(judged), reasons), ("export", len(accepted), len(accepted), {})],
        "usage": usage,
        "audit": {name: dict(counts) for name, counts in audit.items()},
    }


def _card(state: TrajectoryState) -> ServerCard:
    card = state["card"]
    assert card is not None
    return card


STAGES = (propose, vote, write, augment, verify, score, rollout, judge)


def build(context_schema: type[TrajectoryContext] = TrajectoryContext) -> Any:
    """The compiled graph; Studio asks for one with a context of its own."""
    builder = StateGraph(TrajectoryState, context_schema=context_schema, input_schema=TrajectoryInput)
    builder.add_node("collect", collect)
    for stage in STAGES:
        builder.add_node(stage.__name__, stage)
    builder.add_edge(START, "collect")
    builder.add_conditional_edges("collect", _collected, {"propose": "propose", END: END})
    for before, after in pairwise(STAGES):
        builder.add_edge(before.__name__, after.__name__)
    builder.add_edge("judge", END)
    return builder.compile(name="trajectory")


graph = build()
