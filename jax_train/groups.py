"""Rollouts of a policy in environments: episodes through the solver graph, scored from executor records, in groups.

A group is n episodes of one environment. An episode that failed for a reason that the policy could not have caused
(`Episode.status` failed, a bug, the deadline) is tried again under another seed a bounded number of times and then left
out of its group; it never scores 0. What the policy did itself, its own timeouts and spent budgets too, is scored as it
stands. One deadline covers opening, running and scoring an attempt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from astrolabe.envs.python_env import open_episode
from astrolabe.envs.rewards.f1 import score_f1
from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.base import Provenance
from astrolabe.records.environment import Environment
from astrolabe.records.errors import AstrolabeError, ServerError
from astrolabe.records.ids import content_hash, seed_for
from astrolabe.records.trajectory import CallRecord, Reward, Task, Trajectory
from graphs.solver import Budgets, Episode, Policy, ToolExecutor, solve
from graphs.token_policy import Branch, Tape

log = logging.getLogger(__name__)
RewardKind = Literal["f1", "answer"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    n: int = 8
    """Episodes in a group."""
    budgets: Budgets = field(default_factory=Budgets)
    reward: RewardKind = "f1"
    """What is trained: the F1 over tool calls, or whether the typed answer is right."""
    attempts: int = 3
    """Tries of one episode, of which all but the last may fail for reasons of infrastructure."""
    system: str | None = None
    score_s: float = 30.0
    """Deadline of scoring, which is tried twice."""

    @property
    def attempt_s(self) -> float:
        """The deadline over opening, running and scoring one attempt."""
        return self.budgets.wall_s + 2 * self.score_s + 5.0


class EpisodeExecutor(ToolExecutor, Protocol):
    """The part of `astrolabe.envs.executor.Executor` that a rollout uses; `backend.state` is the state at the end."""

    @property
    def changed(self) -> Sequence[bool]: ...
    @property
    def backend(self) -> Any: ...
    async def aclose(self) -> None: ...


Opener = Callable[[Environment], EpisodeExecutor]


def sandboxed(sandbox: Sandbox, budgets: Budgets) -> Opener:
    """Episodes whose tools run in `sandbox`; calls over the budget are answered with an error."""

    def opener(environment: Environment) -> EpisodeExecutor:
        return open_episode(environment, sandbox, max_calls=budgets.max_calls)

    return opener


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One episode, ended and (unless it failed) scored."""

    trajectory: Trajectory
    """Its traces are filled in when its tokens are stored."""
    tape: Tape | None
    index: int
    attempts: int
    seconds: float

    @property
    def scored(self) -> bool:
        return self.trajectory.reward is not None


@dataclass(frozen=True)
class Row:
    """One branch of a tape, as the trainer packs it."""

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    """NaN where mask is 0."""
    versions: list[int]

    @classmethod
    def of(cls, branch: Branch) -> Row:
        """Up to the last sampled token: what follows it trains nothing, and need not fit the context."""
        end = max((i for i, m in enumerate(branch.mask, 1) if m), default=0)
        return cls(branch.tokens[:end], branch.mask[:end], branch.logprobs[:end], branch.versions[:end])

    def to_json(self) -> dict[str, Any]:
        sampled = [i for i, m in enumerate(self.mask) if m]
        return {
            "tokens": self.tokens,
            "mask": self.mask,
            "logprobs": [self.logprobs[i] for i in sampled],
            "versions": [self.versions[i] for i in sampled],
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Row:
        logprobs, versions = iter(row["logprobs"]), iter(row["versions"])
        return cls(
            row["tokens"],
            row["mask"],
            [next(logprobs) if m else math.nan for m in row["mask"]],
            [next(versions) if m else -1 for m in row["mask"]],
        )


@dataclass(frozen=True, kw_only=True)
class Member:
    """A scored rollout as the trainer needs it."""

    reward: float
    accuracy: float
    """1 if the typed answer was right, else 0."""
    rows: list[Row]
    """Branches with at least one sampled token."""
    calls: int
    errors: int
    """Calls whose result was an error."""
    turns: int
    status: str

    @classmethod
    def of(cls, rollout: Rollout) -> Member:
        reward, trajectory = rollout.trajectory.reward, rollout.trajectory
        assert reward is not None
        branches = rollout.tape.branches if rollout.tape is not None else []
        return cls(
            reward=reward.value,
            accuracy=float(bool(reward.answer_correct)),
            rows=[Row.of(branch) for branch in branches if any(branch.mask)],
            calls=len(trajectory.calls),
            errors=sum(call.status == "error" for call in trajectory.calls),
            turns=sum(message.role == "assistant" for message in trajectory.messages),
            status=trajectory.status,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """The scored rollouts of one environment; what the filler keeps and the checkpoint holds."""

    id: str
    environment: str
    members: list[Member]
    failed: dict[str, int] = field(default_factory=dict)
    """Failure -> rollouts that were left out."""

    @property
    def oldest_version(self) -> int:
        sampled = [v for m in self.members for row in m.rows for v, k in zip(row.versions, row.mask, strict=True) if k]
        return min(sampled, default=0)

    def values(self, key: Literal["reward", "accuracy"]) -> list[float]:
        return [member.reward if key == "reward" else member.accuracy for member in self.members]

    @classmethod
    def of(cls, group_id: str, environment: Environment, rollouts: Sequence[Rollout]) -> Group:
        failed: dict[str, int] = {}
        for rollout in rollouts:
            if not rollout.scored:
                failure = rollout.trajectory.failure or "failed"
                failed[failure] = failed.get(failure, 0) + 1
        return cls(
            id=group_id,
            environment=environment.id,
            members=[Member.of(rollout) for rollout in rollouts if rollout.scored],
            failed=failed,
        )

    def to_json(self) -> dict[str, Any]:
        members = [{**vars(member), "rows": [row.to_json() for row in member.rows]} for member in self.members]
        return {"id": self.id, "environment": self.environment, "members": members, "failed": dict(self.failed)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Group:
        members = [Member(**{**m, "rows": [Row.from_json(r) for r in m["rows"]]}) for m in row["members"]]
        return cls(id=row["id"], environment=row["environment"], members=members, failed=dict(row["failed"]))


def group_id(environment: Environment, seed: int) -> str:
    return "gr-" + content_hash([environment.id, seed])


async def roll_group(
    environment: Environment, policy: Policy, opener: Opener, config: RolloutConfig, *, seed: int
) -> list[Rollout]:
    """n rollouts of one environment, in the order of their index, failed ones among them."""
    rolls = [
        roll(environment, policy, opener, config, seed=seed_for(seed, environment.id, "rollout", i), index=i)
        for i in range(config.n)
    ]
    group = group_id(environment, seed)
    return [
        Rollout(**{**vars(r), "trajectory": r.trajectory.model_copy(update={"group": group})})
        for r in await asyncio.gather(*rolls)
    ]


async def roll(
    environment: Environment, policy: Policy, opener: Opener, config: RolloutConfig, *, seed: int, index: int = 0
) -> Rollout:
    """One rollout: attempts until one ends for reasons of the policy's own. Raises what a user must mend, and nothing else."""
    started = time.monotonic()
    attempt = 0
    while True:
        attempt += 1
        episode, reward = await _attempt(environment, policy, opener, config, seed_for(seed, "attempt", attempt))
        if episode.status != "failed" or attempt >= config.attempts:
            break
        log.warning("%s, rollout %d, attempt %d: %s", environment.id, index, attempt, episode.failure)
    if episode.failure == "model_unreachable":
        raise ServerError("the policy's model server cannot be reached", "start it, then run the same command again")
    return Rollout(
        trajectory=_trajectory(environment, episode, reward, seed),
        tape=episode.tape,
        index=index,
        attempts=attempt,
        seconds=time.monotonic() - started,
    )


async def _attempt(
    environment: Environment, policy: Policy, opener: Opener, config: RolloutConfig, seed: int
) -> tuple[Episode, Reward | None]:
    """One try: the episode, and its reward unless it failed. A bug is recorded and counted, and does not end the run."""
    failed = Episode(task=task_of(environment), tools=environment.policy_tools(), messages=[], status="failed")
    try:
        async with asyncio.timeout(config.attempt_s):
            executor = opener(environment)
            try:
                return await _run(environment, policy, executor, config, seed)
            finally:
                await executor.aclose()
    except AstrolabeError:  # a wrong setting or a dead server: every rollout would meet it
        raise
    except TimeoutError:
        failed.failure = "deadline"
    except Exception:
        log.exception("%s: a rollout raised", environment.id)
        failed.failure = "internal"
    return failed, None


async def _run(
    environment: Environment, policy: Policy, executor: EpisodeExecutor, config: RolloutConfig, seed: int
) -> tuple[Episode, Reward | None]:
    episode = await solve(
        task_of(environment),
        environment.policy_tools(),
        executor,
        policy,
        budgets=config.budgets,
        system=config.system,
        seed=seed,
    )
    reward = None if episode.status == "failed" else await _score(environment, executor, episode, config)
    if reward is None and episode.status != "failed":
        episode.status, episode.failure = "failed", "verifier_timeout"
    return episode, reward


async def _score(
    environment: Environment, executor: EpisodeExecutor, episode: Episode, config: RolloutConfig
) -> Reward | None:
    """The reward, computed off the loop under a deadline; None if it timed out twice."""
    records: Sequence[CallRecord] = list(executor.records)
    changed, state = list(executor.changed), executor.backend.state
    for _ in range(2):
        try:
            async with asyncio.timeout(config.score_s):
                reward = await asyncio.to_thread(score_f1, environment, records, changed, state, episode.final_text)
        except TimeoutError:
            continue
        if config.reward == "answer" and environment.answer_type != "none":
            return reward.model_copy(update={"kind": "answer", "value": float(bool(reward.answer_correct))})
        return reward
    return None


def task_of(environment: Environment) -> Task:
    return Task(question=environment.question, environment=environment.id, kind=environment.expect).with_id()


def _trajectory(environment: Environment, episode: Episode, reward: Reward | None, seed: int) -> Trajectory:
    status = episode.status
    assert status != "running"
    return Trajectory(
        schema="astrolabe.trajectory/1",
        task=episode.task,
        language=environment.language,
        tools=episode.tools,
        messages=episode.messages,
        calls=episode.calls,
        status=status,
        failure=episode.failure,
        reward=reward,
        provenance=Provenance(
            source=environment.provenance.get("source"),
            license=environment.provenance.get("license"),
            seed=seed,
            models={"policy": episode.model} if episode.model else {},
            usage=episode.usage,
        ),
    ).with_id()
