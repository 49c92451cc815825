"""Tasks of one server: written for verified chains and for the server alone, varied, read back, rated.

A draft carries its task and how it came about; every stage either passes it on or ends it with reason codes, so that the
funnel adds up. An original is kept once, whatever becomes of its variations. A variation is a new draft that must pass
the same checks as its original: the back translation has to find the same tools in the same order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import astrolabe
from agents import planner
from agents.planner import RATING_SCORE, AugmentMode, ServerInfo
from agents.tool_docs import names_tool
from astrolabe.records.base import Usage
from astrolabe.records.card import ServerCard
from astrolabe.records.equality import has_chinese
from astrolabe.records.ids import seed_for
from astrolabe.records.jsonl import read_rows
from astrolabe.records.trajectory import Task, TaskKind
from graphs.argument_flow import argument_gaps
from graphs.trajectory_context import TrajectoryContext

MODES: tuple[AugmentMode, ...] = ("diverse", "complex", "persona")


@dataclass(frozen=True)
class Plan:
    """A task that is to be written."""

    kind: TaskKind
    chain: tuple[str, ...] | None
    language: Literal["en", "zh"]


@dataclass(frozen=True)
class Draft:
    """A task on its way; `reasons` is empty while it is alive."""

    task: Task
    language: Literal["en", "zh"]
    stage: str
    models: dict[str, str] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    reasons: tuple[str, ...] = ()
    detail: str = ""

    def ended(self, stage: str, *reasons: str, detail: str = "", usage: Usage | None = None) -> Draft:
        return replace(self, stage=stage, reasons=reasons, detail=detail, usage=self.usage + (usage or Usage()))

    @property
    def chain(self) -> list[str]:
        return self.task.chain or []


@cache
def personas(language: str) -> list[dict[str, Any]]:
    """The shipped personas of one language (`astrolabe/data/personas.jsonl`, written for this project)."""
    path = Path(astrolabe.__file__).parent / "data" / "personas.jsonl"
    return [
        {k: v for k, v in row.items() if k != "language"} for _, row in read_rows(path) if row["language"] == language
    ]


def plan_tasks(
    card: ServerCard, chains: Sequence[Sequence[str]], ctx: TrajectoryContext, rng: random.Random
) -> list[Plan]:
    """What to write for a server: one task a chain, some for the server alone, and now and then one that must be declined
    or asked back about. Chinese cards get Chinese tasks, others a share of them."""

    def language() -> Literal["en", "zh"]:
        return "zh" if card.language == "zh" or rng.random() < ctx.chinese_share else "en"

    plans = [Plan("answer", tuple(chain), language()) for chain in chains]
    alone = ctx.server_tasks if chains else ctx.server_tasks + 1
    plans += [Plan("answer", None, language()) for _ in range(alone)]
    plans += [Plan("ask", None, language())] * (rng.random() < ctx.ask_share)
    plans += [Plan("abstain", None, language())] * (rng.random() < ctx.abstain_share)
    return plans


def _info(card: ServerCard) -> ServerInfo:
    return ServerInfo(name=card.name, description=card.description, domain=card.domain)


async def write(card: ServerCard, plan: Plan, ctx: TrajectoryContext, *, seed: int, item: str) -> Draft:
    """One task from a plan. A reply that gives other tools than the plan's chain, a tool that the server does not have, or
    a chain whose arguments cannot be had ends the draft."""
    request = planner.TaskRequest(
        server=_info(card), tools=card.tools, chain=list(plan.chain) if plan.chain else None, kind=plan.kind,
        language=plan.language,
    )  # fmt: skip
    result = await planner.write_task(request, ctx, seed=seed_for(seed, "write"), item=item)
    empty = Task(question="", server=card.name, chain=list(plan.chain or []) or None, kind=plan.kind)
    draft = Draft(empty, plan.language, "write", {"planner": result.model}, result.usage)
    if result.reply is None:
        return draft.ended("write", str(result.failure), detail=result.detail)
    chain = result.reply.chain
    task = Task(question=result.reply.question, server=card.name, chain=chain or None, kind=plan.kind).with_id()
    return check_text(replace(draft, task=task), card, plan.chain)


def check_text(draft: Draft, card: ServerCard, wanted: Sequence[str] | None) -> Draft:
    """What can be checked of a task without a model."""
    tools = {tool.name: tool for tool in card.tools}
    gaps = argument_gaps(draft.chain, tools) if draft.task.kind != "ask" else []
    reasons = [gap.reason for gap in gaps]
    detail = "; ".join(map(str, gaps))
    named = names_tool(draft.task.question, tools)
    if named:
        reasons.append("names_tool")
        detail = f"{detail}; the question names {named}".strip("; ")
    if wanted is not None and draft.chain != list(wanted):
        reasons.append("chain_mismatch")
    if draft.task.kind == "answer" and not draft.chain:
        reasons.append("chain_mismatch")
    if draft.language == "zh" and not has_chinese(draft.task.question):
        reasons.append("wrong_language")
    return draft.ended(draft.stage, *dict.fromkeys(reasons), detail=detail) if reasons else draft


async def augment(card: ServerCard, original: Draft, mode: AugmentMode, ctx: TrajectoryContext, *, seed: int) -> Draft:
    """A variation of a live original."""
    rng = random.Random(seed_for(seed, "persona"))
    request = planner.AugmentRequest(
        question=original.task.question, chain=original.chain, tools=card.tools, mode=mode, language=original.language,
        persona=rng.choice(personas(original.language)) if mode == "persona" else None,
    )  # fmt: skip
    result = await planner.augment_task(request, ctx, seed=seed_for(seed, "augment", mode), item=original.task.id)
    draft = Draft(
        original.task.model_copy(update={"augmentation": mode, "question": "", "id": ""}), original.language, "augment",
        {"planner": result.model}, result.usage,
    )  # fmt: skip
    if result.reply is None:
        return draft.ended("augment", str(result.failure), detail=result.detail)
    task = draft.task.model_copy(update={"question": result.reply.question}).with_id()
    draft = replace(draft, task=task)
    if result.reply.question == original.task.question:
        return draft.ended("augment", "unchanged")
    return check_text(draft, card, original.chain)


async def verify(card: ServerCard, draft: Draft, ctx: TrajectoryContext, *, seed: int) -> Draft:
    """Back translation: the planner sees the question and the tools, and must find the draft's kind and chain."""
    request = planner.CheckRequest(question=draft.task.question, tools=card.tools, language=draft.language)
    result = await planner.check_task(request, ctx, seed=seed_for(seed, "verify"), item=draft.task.id)
    if result.reply is None:
        return draft.ended("verify", str(result.failure), detail=result.detail, usage=result.usage)
    found = result.reply
    reasons = []
    if found.kind != draft.task.kind:
        reasons.append("kind_mismatch")
    if found.chain != draft.chain:
        reasons.append("chain_mismatch")
    if reasons:
        return draft.ended("verify", *reasons, detail=f"read back as {found.kind}: {found.chain}", usage=result.usage)
    return replace(draft, stage="verify", usage=draft.usage + result.usage)


async def rate(card: ServerCard, draft: Draft, ctx: TrajectoryContext, *, seed: int) -> Draft:
    """The three ratings against their thresholds."""
    request = planner.ScoreRequest(
        question=draft.task.question, kind=draft.task.kind, chain=draft.chain, tools=card.tools, language=draft.language
    )
    result = await planner.score_task(request, ctx, seed=seed_for(seed, "score"), item=draft.task.id)
    if result.reply is None:
        return draft.ended("score", str(result.failure), detail=result.detail, usage=result.usage)
    ratings = result.reply.model_dump()
    floors = {
        "question_quality": ctx.min_question_quality,
        "scenario_realism": ctx.min_scenario_realism,
        "tool_necessity": ctx.min_tool_necessity,
    }
    low = [f"low_{name}" for name, floor in floors.items() if RATING_SCORE[ratings[name]] < floor]
    if low:
        return draft.ended("score", *low, detail=str(ratings), usage=result.usage)
    return replace(draft, stage="score", usage=draft.usage + result.usage)


async def vote(
    card: ServerCard, chain: Sequence[str], ctx: TrajectoryContext, *, seed: int
) -> tuple[list[str], Usage, str]:
    """(reasons against the chain, usage, detail). The quorum is over all that were asked: a vote that is unreadable or
    missing counts against, so one yes among nine broken replies is no."""
    table = {tool.name: tool for tool in card.tools}
    request = planner.VoteRequest(
        server=_info(card), tools=[table[name] for name in chain], chain=list(chain), language=card.language
    )
    votes = await asyncio.gather(
        *(
            planner.vote_chain(request, ctx, seed=seed_for(seed, "vote", n), item=">".join(chain))
            for n in range(ctx.votes)
        )
    )
    usage = sum((v.usage for v in votes), Usage())
    yes = sum(1 for v in votes if v.reply is not None and v.reply.valid)
    if 2 * yes > ctx.votes:
        return [], usage, ""
    unread = sum(1 for v in votes if v.reply is None)
    against = next((v.reply.reason for v in votes if v.reply is not None and not v.reply.valid), "")
    return ["no_quorum"], usage, f"{yes} of {ctx.votes} for, {unread} unreadable. {against}".strip()


async def propose(
    card: ServerCard, ctx: TrajectoryContext, *, seed: int
) -> tuple[list[list[str]], list[str], Usage, str]:
    """(chains said to have a dependency, reasons if there was no reply, usage, model)."""
    request = planner.ChainsRequest(
        server=_info(card), tools=card.tools, max_chains=ctx.proposals, max_length=ctx.max_chain, language=card.language
    )
    result = await planner.propose_chains(request, ctx, seed=seed_for(seed, "propose"), item=card.name)
    if result.reply is None:
        return [], [str(result.failure)], result.usage, result.model
    kept = [c.tools for c in result.reply.chains if c.dependency == "yes"]
    return kept, [], result.usage, result.model
