"""The judge: the seven judgements of a finished trajectory, fail closed.

Which judgements apply is decided here, in code, from the task's kind and the calls. `tool_success` is counted from the
executor's records; the six others are agents of their own (`agents/judges/`). A verdict is pass, fail or unjudged: a
model that gives no valid reply, or an exception of its server, never becomes a pass. A trajectory is accepted if every
applicable judgement passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.context import Context
from agents.judges import (
    final_answer,
    query_planning,
    query_understanding,
    tool_conciseness,
    tool_planning,
    tool_success,
    tool_understanding,
)
from agents.judges.common import Item, Judge
from astrolabe.records.base import Usage
from astrolabe.records.ids import seed_for
from astrolabe.records.trajectory import JUDGES, Trajectory, Verdict

BY_MODEL: dict[str, Judge[Any, Any]] = {
    module.JUDGE.name: module.JUDGE
    for module in (
        query_understanding,
        query_planning,
        tool_understanding,
        tool_planning,
        tool_conciseness,
        final_answer,
    )
}
AGENTS = tuple(judge.agent for judge in BY_MODEL.values())
FLOORS: dict[str, float] = dict.fromkeys(JUDGES, 0.5)
"""The least score of any item with which a judgement passes."""
MAX_REASON = 500
graph = final_answer.graph


@dataclass(frozen=True)
class Judgement:
    """The seven verdicts in FORMATS' order, their mean (None if any is unjudged or none applies), and what they cost."""

    verdicts: list[Verdict]
    score: float | None
    usage: Usage = field(default_factory=Usage)

    @property
    def accepted(self) -> bool:
        """Every applicable verdict is a pass, and there is one."""
        return accepted(self.verdicts)


def accepted(verdicts: Sequence[Verdict]) -> bool:
    """The acceptance rule: every applicable verdict is a pass (so none is unjudged), and at least one applies."""
    applicable = [v for v in verdicts if v.verdict != "not_applicable"]
    return bool(applicable) and all(v.verdict == "pass" for v in applicable)


def mean_score(verdicts: Sequence[Verdict]) -> float | None:
    """Mean of the applicable scores; None if any is unjudged or none applies."""
    applicable = [v for v in verdicts if v.verdict != "not_applicable"]
    scores = [v.score for v in applicable if v.score is not None]
    return round(sum(scores) / len(scores), 6) if scores and len(scores) == len(applicable) else None


async def judge_trajectory(
    trajectory: Trajectory, ctx: Context, *, seed: int, floors: Mapping[str, float] = FLOORS
) -> Judgement:
    """Judge a finished trajectory. Raises ServerError if the judge's server cannot be reached."""
    results = await asyncio.gather(
        *(_by_model(judge, trajectory, ctx, seed, floors[name]) for name, judge in BY_MODEL.items())
    )
    by_name = {verdict.judge: verdict for verdict, _ in results}
    by_name[tool_success.NAME] = tool_success.judge(trajectory, floors[tool_success.NAME])
    verdicts = [by_name[name] for name in JUDGES]
    return Judgement(verdicts, mean_score(verdicts), sum((usage for _, usage in results), Usage()))


async def _by_model(
    judge: Judge[Any, Any], trajectory: Trajectory, ctx: Context, seed: int, floor: float
) -> tuple[Verdict, Usage]:
    if judge.name == "query_planning" and trajectory.task.kind == "answer" and not trajectory.calls:
        reason = "the task needs tools and no call was made"
        return Verdict(judge=judge.name, verdict="fail", score=0.0, reason=reason, attempts=0), Usage()
    if not judge.applies(trajectory):
        return Verdict(judge=judge.name, verdict="not_applicable", attempts=0), Usage()
    requests = judge.requests(trajectory)
    if not requests:
        # What should be judged is not there (no assistant message, results that nothing follows): that is no pass.
        return Verdict(judge=judge.name, verdict="unjudged", reason="nothing to judge", attempts=0), Usage()
    results = await asyncio.gather(
        *(
            judge.agent(request, ctx, seed=seed_for(seed, judge.name, index), item=trajectory.task.id)
            for index, request in enumerate(requests)
        )
    )
    usage = sum((result.usage for result in results), Usage())
    attempts = sum(result.attempts for result in results)
    model = next((result.model for result in results if result.model), "")
    items: list[Item] = []
    for request, result in zip(requests, results, strict=True):
        found = judge.items(request, result.reply) if result.reply is not None else None
        if found is None:
            why = f"{result.failure}: {result.detail}" if result.failure else "the reply does not match what was asked"
            verdict = Verdict(
                judge=judge.name, verdict="unjudged", reason=why[:MAX_REASON], model=model, attempts=attempts
            )
            return verdict, usage
        items += found
    score = round(sum(item.score for item in items) / len(items), 6)
    passed = min(item.score for item in items) >= floor
    worst = min(items, key=lambda item: item.score)
    return (
        Verdict(
            judge=judge.name,
            verdict="pass" if passed else "fail",
            score=score,
            reason=worst.reason[:MAX_REASON],
            model=model,
            attempts=attempts,
        ),
        usage,
    )
