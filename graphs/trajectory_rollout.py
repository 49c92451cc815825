"""A task played in the stateful emulator under seeded faults, and judged.

The episode runs through the solver, the one agent loop; the seven judgements fail closed; what is accepted finished by
itself, made no call that its tool's schema refuses, failed no judgement and left none unjudged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from agents.emulator import open_emulator
from agents.policy import system_prompt
from astrolabe import __version__
from astrolabe.envs.executor import Executor
from astrolabe.envs.faults import FaultPlan
from astrolabe.records.base import Provenance, Usage
from astrolabe.records.card import ServerCard
from astrolabe.records.errors import ServerError
from astrolabe.records.ids import seed_for
from astrolabe.records.messages import ToolSchema
from astrolabe.records.trajectory import Trajectory
from astrolabe.records.versions import code_commit
from graphs.solver import Budgets, solve
from graphs.solver_policies import ChatPolicy
from graphs.trajectory_context import TrajectoryContext
from graphs.trajectory_tasks import Draft


@dataclass(frozen=True)
class Played:
    """A draft after its rollout."""

    draft: Draft
    trajectory: Trajectory
    reasons: tuple[str, ...]
    detail: str
    seconds: float
    usage: Usage


def _provenance(
    card: ServerCard,
    draft: Draft,
    models: dict[str, str],
    usage: Usage,
    prompts: dict[str, str],
    ctx: TrajectoryContext,
) -> Provenance:
    return Provenance(
        source=card.source,
        license=card.license,
        seed=ctx.seed,
        version=__version__,
        commit=code_commit(),
        models={role: model for role, model in sorted({**draft.models, **models}.items()) if model},
        prompts=prompts,
        usage=usage,
    )


async def play(card: ServerCard, draft: Draft, ctx: TrajectoryContext, prompts: dict[str, str], *, seed: int) -> Played:
    """The rollout of one task; a failed or cut one is not judged."""
    start = time.monotonic()
    task = draft.task
    tools = [ToolSchema(function=tool) for tool in card.tools]
    backend = open_emulator(card, ctx, seed=seed_for(seed, "emulator"), item=task.id)
    executor = Executor(
        tools, backend, faults=FaultPlan(rate=ctx.fault_rate, seed=ctx.seed), episode=task.id, max_calls=ctx.max_calls
    )
    budgets = Budgets(max_turns=ctx.max_turns, max_calls=ctx.max_calls, max_tokens=ctx.max_tokens)
    try:
        episode = await solve(
            task, tools, executor, ChatPolicy(ctx.client("policy")), budgets=budgets,
            system=system_prompt(draft.language), seed=seed_for(seed, "policy"),
        )  # fmt: skip
    finally:
        await executor.aclose()
    if episode.failure == "model_unreachable":  # every other task would fail as well: the run stops, and can go on
        raise ServerError("the policy's model server cannot be reached", "start it, then run the same command again")
    usage = draft.usage + episode.usage + backend.usage
    assert episode.status != "running"
    trajectory = Trajectory(
        schema="astrolabe.trajectory/1",
        task=task,
        language=draft.language,
        tools=tools,
        messages=episode.messages,
        calls=list(executor.records),
        status=episode.status,
        failure=episode.failure,
        provenance=_provenance(card, draft, {"policy": episode.model, "emulator": backend.model}, usage, prompts, ctx),
    ).with_id()
    reasons: list[str] = []
    if episode.status != "finished":
        reasons.append(f"{episode.status}_{episode.failure}")
    return Played(draft, trajectory, tuple(reasons), "", time.monotonic() - start, usage)


def invalid_calls(trajectory: Trajectory) -> list[str]:
    """The calls that were the policy's own mistake: malformed, of no tool, or refused by the tool's schema."""
    return [
        f"{c.id} {c.tool}: {c.error.kind}"
        for c in trajectory.calls
        if c.error is not None and c.error.class_ == "policy"
    ]


def decide(trajectory: Trajectory, ctx: TrajectoryContext) -> list[str]:
    """Reason codes against a judged trajectory; empty if it is accepted."""
    reasons = [f"unjudged_{v.judge}" for v in trajectory.verdicts if v.verdict == "unjudged"]
    reasons += [f"failed_{v.judge}" for v in trajectory.verdicts if v.verdict == "fail"]
    if not trajectory.verdicts:
        reasons.append("unjudged")
    if invalid_calls(trajectory):
        reasons.append("invalid_call")
    if trajectory.task.kind == "answer" and not trajectory.calls:
        reasons.append("no_call")
    if trajectory.score is not None and trajectory.score < ctx.min_score:
        reasons.append("low_score")
    return reasons
