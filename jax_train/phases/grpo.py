"""GRPO on environments: groups are rolled out by the current weights, batches filled, one step taken, weights swapped.

    dispatch groups ahead -> rollouts through the solver graph -> filler -> advantages -> packed step -> new weights
    into the engine -> rollouts of the step stored -> checkpoint (state, filler, positions, version, consumed ids)

Synchronous by default: a run that is killed and started again goes through the same tokens, losses and weights as one
that was not. Sampling is at temperature 1 over the whole distribution: there is no setting for it, since the log-probs
of anything else are not those of the policy that is trained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from astrolabe.progress import track
from astrolabe.records.environment import Environment
from astrolabe.records.ids import seed_for
from astrolabe.records.run_store import RunStore
from graphs.solver import Policy
from jax_train.advantages import group_advantages
from jax_train.agreement import Agreement, MismatchGate, agreement
from jax_train.filler import Filler, FillerConfig
from jax_train.groups import Group, Opener, Rollout, RolloutConfig, roll_group
from jax_train.packing import Sample
from jax_train.rollout import group_outcome
from jax_train.scheduler import Scheduler, Slot
from serving.sync import WeightSync

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    steps: int
    """Steps in all; a resumed run does what is left of them."""
    filler: FillerConfig
    rollout: RolloutConfig
    gate: MismatchGate = field(default_factory=MismatchGate)
    normalise_std: bool = True
    leave_one_out: bool = False
    synchronous: bool = True
    max_in_flight: int = 8
    """Groups that are sampled at a time."""
    checkpoint_every: int = 5
    store_rollouts: bool = True
    """Whether the run keeps every rollout with its tokens."""


class Learner(Protocol):
    """The trainer's side: state, packed step and log-prob pass (`learner.py`)."""

    @property
    def params(self) -> Any: ...

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The trainer's log-probs of the trained tokens of each sample [n]; 0 where mask is 0."""
        ...

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step; its metrics."""
        ...


class Checkpoints(Protocol):
    """Where the state of a run is kept: the learner's with `extra` (plain JSON), whole or not at all."""

    def restore(self) -> tuple[int, dict[str, Any]] | None:
        """(step, extra) of the newest checkpoint, with the learner's state put back; None where there is none."""
        ...

    def save(self, step: int, extra: dict[str, Any]) -> None: ...


def samples_of(
    groups: Sequence[Group], *, normalise_std: bool = True, leave_one_out: bool = False
) -> tuple[list[Sample], list[np.ndarray]]:
    """What a batch of groups trains: one sample per branch with its rollout's advantage, and the weight version of each
    of its tokens [n]. A rollout without a sampled token has no sample, but counts in its group's mean."""
    samples: list[Sample] = []
    versions: list[np.ndarray] = []
    for group in groups:
        advantages = group_advantages(
            [member.reward for member in group.members], normalise_std=normalise_std, leave_one_out=leave_one_out
        )
        for index, (member, advantage) in enumerate(zip(group.members, advantages, strict=True)):
            for row in member.rows:
                samples.append(
                    Sample(
                        tokens=np.asarray(row.tokens, np.int32),
                        mask=np.asarray(row.mask, np.int8),
                        logprobs=np.asarray(row.logprobs, np.float32),
                        advantage=float(advantage),
                        item=f"{group.id}/{index}",
                    )
                )
                versions.append(np.asarray(row.versions, np.int32))
    return samples, versions


class GrpoLoop:
    """The loop of one run. `version` counts weight versions: step k trains weights k on what they sampled."""

    def __init__(
        self,
        settings: GrpoSettings,
        environments: Sequence[Environment],
        *,
        learner: Learner,
        policy: Policy,
        opener: Opener,
        sync: WeightSync,
        checkpoints: Checkpoints,
        store: RunStore,
        seed: int,
    ) -> None:
        self.settings = settings
        self.learner, self.sync, self.checkpoints, self.store = learner, sync, checkpoints, store
        self.filler: Filler[Group] = Filler(settings.filler)
        self.scheduler = Scheduler(
            environments,
            self.filler,
            self._roll,
            seed=seed_for(seed, "grpo"),
            max_in_flight=settings.max_in_flight,
            deadline_s=settings.rollout.attempts * settings.rollout.attempt_s + 30.0,
            synchronous=settings.synchronous,
            landed=self._landed,
        )
        self.version = 0
        self.consumed: list[str] = []
        """Ids of the groups that were trained on, in order."""
        self._policy, self._opener = policy, opener
        self._rolled: dict[str, list[Rollout]] = {}
        self._new: list[tuple[Slot, Group | None, str | None, list[Rollout]]] = []
        """What landed since the last step, in the order of landing."""

    async def run(self, *, until: int | None = None, progress: bool = True) -> None:
        """Train up to step `until` (all steps by default). FillingFailed or RunError where it cannot go on."""
        last = min(self.settings.steps, until if until is not None else self.settings.steps)
        await self._resume()
        try:
            with track("GRPO", last, done=self.version, show=progress) as bar:
                while self.version < last:
                    row = await self._step()
                    bar.advance(1, f"reward {row['reward']:.3f} · accepted {row['accept_rate']:.0%}")
        finally:
            await self.scheduler.stop()

    async def _resume(self) -> None:
        found = self.checkpoints.restore()
        if found is not None:
            self.version, extra = found
            self.consumed = list(extra["consumed"])
            self.filler.load_state_dict(extra["filler"], Group.from_json)
            self.scheduler.load_state_dict(extra["scheduler"])
            log.info("continuing after step %d", self.version)
        await self.sync.push(self.learner.params, self.version)

    async def _roll(self, slot: Slot) -> Group:
        rollouts = await roll_group(slot.environment, self._policy, self._opener, self.settings.rollout, seed=slot.seed)
        self._rolled[slot.id] = rollouts
        return Group.of(slot.id, slot.environment, rollouts)

    def _landed(self, slot: Slot, group: Group | None, reason: str | None) -> None:
        self._new.append((slot, group, reason, self._rolled.pop(slot.id, [])))

    async def _step(self) -> dict[str, Any]:
        """One step: a full batch, an update, the new weights pushed, everything stored."""
        started = time.monotonic()
        batch = await self.scheduler.fill(self.version)
        filled = time.monotonic()
        samples, versions = samples_of(
            batch, normalise_std=self.settings.normalise_std, leave_one_out=self.settings.leave_one_out
        )
        found = self._agreement(samples, versions)
        report = self.learner.update(samples)
        trained = time.monotonic()
        stale = self.version - np.concatenate([v[v >= 0] for v in versions])
        row: dict[str, Any] = {
            "phase": "grpo",
            "step": self.version,
            **self._episode_metrics(),
            **self._filler_metrics(),
            **report,
            **found.metrics(),
            "staleness_mean": float(stale.mean()),
            "staleness_max": int(stale.max()),
            "trained_tokens": int(stale.size),
            "trained_rollouts": len({sample.item for sample in samples}),
        }
        self.consumed += [group.id for group in batch]
        self.version += 1
        await self.sync.push(self.learner.params, self.version)
        row |= {
            "rollout_s": round(filled - started, 3),
            "train_s": round(trained - filled, 3),
            "sync_s": round(time.monotonic() - trained, 3),
        }
        self._store(row)
        if self.version % self.settings.checkpoint_every == 0 or self.version == self.settings.steps:
            self.checkpoints.save(self.version, self.state_dict())
        return row

    def _agreement(self, samples: Sequence[Sample], versions: Sequence[np.ndarray]) -> Agreement:
        """Engine against trainer on the tokens that the present weights sampled."""
        trainer = np.concatenate(self.learner.logprobs(samples))
        engine = np.concatenate([np.asarray(sample.logprobs) for sample in samples])
        found = agreement(trainer, engine, np.concatenate(versions) == self.version)
        if self.settings.gate.check(found):
            log.warning("step %d: engine and trainer differ by KL %.3g nats per token", self.version, found.kl)
        return found

    def _episode_metrics(self) -> dict[str, Any]:
        """Means over all scored rollouts that landed since the last step, dropped groups too."""
        members = [m for _, group, _, _ in self._new if group is not None for m in group.members]

        def mean(value: Callable[[Any], float]) -> float:
            return float(np.mean([value(m) for m in members])) if members else 0.0

        failed: dict[str, int] = {}
        for _, group, _, _ in self._new:
            for reason, count in (group.failed if group is not None else {}).items():
                failed[reason] = failed.get(reason, 0) + count
        return {
            "reward": mean(lambda m: m.reward),
            "answer_accuracy": mean(lambda m: m.accuracy),
            "calls": mean(lambda m: m.calls),
            "errors": mean(lambda m: m.errors),
            "turns": mean(lambda m: m.turns),
            "truncated": mean(lambda m: float(m.status == "truncated")),
            "sampled_tokens": mean(lambda m: sum(sum(row.mask) for row in m.rows)),
            "rollouts": len(members),
            "failed": failed,
        }

    def _filler_metrics(self) -> dict[str, Any]:
        ledger = self.filler.ledger
        kept = sum(reason is None for _, _, reason, _ in self._new)
        return {
            "groups": len(self._new),
            "accept_rate": kept / len(self._new) if self._new else 1.0,
            "buffered": len(self.filler.buffer),
            "dispatched": ledger.dispatched,
            "trained": ledger.trained,
            "dropped": dict(ledger.dropped),
        }

    def _store(self, row: dict[str, Any]) -> None:
        """Commit the step: what landed, and its metrics. A step that a killed run had committed is not doubled."""
        landed, self._new = self._new, []
        item = f"step-{row['step']}"
        if self.store.is_done(item):
            return
        rows: dict[str, list[dict[str, Any]]] = {"rollouts": []}
        rejected, funnel, timings = [], [], []
        for slot, _, _, rollouts in landed:
            outcome = group_outcome(slot.id, rollouts)
            rejected += outcome.rejected
            funnel += outcome.funnel
            timings += outcome.timings
            if self.settings.store_rollouts and outcome.at_commit is not None:
                rows["rollouts"] += outcome.at_commit(self.store)["rollouts"]
        self.store.commit(item, rows=rows, rejected=rejected, funnel=funnel, timings=timings, metrics=[row])

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint holds beside the learner's state, as plain JSON."""
        return {
            "consumed": list(self.consumed),
            "filler": self.filler.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
