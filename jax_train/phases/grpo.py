"""GRPO on environments: groups are rolled out by the current weights, batches filled, one step taken, weights swapped.

    dispatch groups ahead -> rollouts through the solver graph -> filler -> advantages -> packed step -> new weights
    into the engine -> rollouts of the step stored -> checkpoint (state, filler, positions, version, consumed ids)

Synchronous by default: a run that is killed and started again goes through the same tokens, losses and weights as one
that was not. What differs between runs is the last bits of the engine's log-probs, which depend on what it batched
together; so where they are within `NOISE` of the trainer's, the trainer's are taken. Sampling is at temperature 1 over the whole distribution: there is no setting for it, since the log-probs
of anything else are not those of the policy that is trained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from astrolabe.envs.sandbox import Sandbox
from astrolabe.model.safetensors_io import save_params
from astrolabe.progress import track
from astrolabe.records.environment import Environment, read_environments
from astrolabe.records.errors import ServerError, UsageError
from astrolabe.records.ids import content_hash, seed_for
from astrolabe.records.run_store import RunStore
from graphs.solver import Budgets, Policy
from graphs.token_policy import TokenPolicy
from jax_train.advantages import group_advantages
from jax_train.agreement import Agreement, MismatchGate, agreement
from jax_train.checkpoint import Checkpoints
from jax_train.config import GrpoConfig, GrpoRolloutSection
from jax_train.filler import Filler, FillerConfig
from jax_train.groups import Group, Opener, Rollout, RolloutConfig, roll_group, sandboxed
from jax_train.learner import PackedLearner
from jax_train.losses.grpo import GrpoHyper, grpo_loss
from jax_train.packing import Sample
from jax_train.rollout import group_outcome
from jax_train.scheduler import Scheduler, Slot
from jax_train.trainer import Trainer, identity, model_fingerprint
from serving.chat import ModelFailure
from serving.engine.engine import Engine
from serving.render import Renderer, check_template
from serving.sync import DiskSync, InProcessSync, WeightSync
from serving.tokens import HttpTokenClient, Sampling, TokenClient

log = logging.getLogger(__name__)
NOISE = 1e-3
"""Nats within which the engine's and the trainer's log-prob of a token are the same number, up to rounding."""


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


def rollout_config(section: GrpoRolloutSection, *, max_context: int) -> RolloutConfig:
    """Rollouts as configured, within the tokens that a row can hold."""
    budgets = Budgets(
        max_turns=section.max_turns,
        max_calls=section.max_calls,
        max_tokens=section.max_tokens,
        max_context=max_context,
        wall_s=section.wall_s,
    )
    return RolloutConfig(
        n=section.n, budgets=budgets, reward=section.reward, attempts=section.attempts, system=section.system
    )


def settings_of(config: GrpoConfig) -> GrpoSettings:
    """The loop's part of a configuration."""
    return GrpoSettings(
        steps=config.steps,
        filler=FillerConfig(**config.filler.model_dump()),
        rollout=rollout_config(config.rollout, max_context=min(config.batch.budget, config.engine.max_len)),
        gate=MismatchGate(warn=config.mismatch_warn, stop=config.mismatch_stop),
        normalise_std=config.normalise_std,
        leave_one_out=config.leave_one_out,
        synchronous=config.synchronous,
        max_in_flight=config.rollout.max_in_flight,
        checkpoint_every=config.checkpoint.every,
        store_rollouts=config.store_rollouts,
    )


class Learner(Protocol):
    """The trainer's side: state, packed step and log-prob pass (`learner.py`)."""

    @property
    def params(self) -> Any: ...

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The trainer's log-probs of the trained tokens of each sample [n]; 0 where mask is 0."""
        ...

    def update(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One optimizer step; its metrics."""
        ...


class Checkpointing(Protocol):
    """Where the state of a run is kept: the learner's with `extra` (plain JSON), whole or not at all
    (`checkpoint.Checkpoints`)."""

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
        checkpoints: Checkpointing,
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
        # What a killed run committed after its last checkpoint comes again.
        self.store.rewind(f"step-{self.version}" if found is not None else None)
        await self._push()

    async def _push(self) -> None:
        """The present weights to who samples. ServerError if a server does not take them."""
        try:
            await self.sync.push(self.learner.params, self.version)
        except ModelFailure as failure:
            raise ServerError(
                f"the server did not take the weights of step {self.version}: {failure}",
                "see the server's log; the same command goes on once it answers",
            ) from None

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
        if not self.settings.synchronous:
            self.scheduler.dispatch(self.filler.wanted())  # the next batch is sampled while this one is trained on
        samples, versions, report = await asyncio.to_thread(self._train, batch)
        trained = time.monotonic()
        stale = self.version - np.concatenate([v[v >= 0] for v in versions])
        self.consumed += [group.id for group in batch]
        self.version += 1
        await self._push()
        row: dict[str, Any] = {
            "phase": "grpo",
            "step": self.version,
            **self._episode_metrics(),
            **self._filler_metrics(),
            **report,
            "staleness_mean": float(stale.mean()),
            "staleness_max": int(stale.max()),
            "trained_rollouts": len({sample.item for sample in samples}),
            "rollout_s": round(filled - started, 3),
            "train_s": round(trained - filled, 3),
            "sync_s": round(time.monotonic() - trained, 3),
        }
        self._store(row)
        if self.version % self.settings.checkpoint_every == 0 or self.version == self.settings.steps:
            self.checkpoints.save(self.version, self.state_dict())
        return row

    def _train(self, batch: Sequence[Group]) -> tuple[list[Sample], list[np.ndarray], dict[str, Any]]:
        """The update on a batch: its samples, their versions, and the metrics."""
        # Fresh groups that wait for the next batch are compared now, while the weights that sampled them are here.
        found = self._anchor([group for group in [*batch, *self.filler.buffer] if group.oldest_version == self.version])
        samples, versions = samples_of(
            batch, normalise_std=self.settings.normalise_std, leave_one_out=self.settings.leave_one_out
        )
        return samples, versions, {**self.learner.update(samples), **found.metrics()}

    def _anchor(self, fresh: Sequence[Group]) -> Agreement:
        """Engine against trainer on groups that the present weights sampled whole; RunError where they disagree. Within
        `NOISE` the trainer's log-probs take the place of the engine's."""
        samples, _ = samples_of(fresh)
        if not samples:
            return agreement([], [], [])
        rows = [row for group in fresh for member in group.members for row in member.rows]
        ours = self.learner.logprobs(samples)
        theirs = [np.asarray(row.logprobs, np.float32) for row in rows]
        masks = [np.asarray(row.mask) for row in rows]
        found = agreement(np.concatenate(ours), np.concatenate(theirs), np.concatenate(masks))
        if self.settings.gate.check(found):
            log.warning("step %d: engine and trainer differ by KL %.3g nats per token", self.version, found.kl)
        for row, trainer, engine in zip(rows, ours, theirs, strict=True):
            row.logprobs[:] = np.where(np.abs(trainer - engine) < NOISE, trainer, engine).tolist()
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
        """Commit the step: what landed, and its metrics."""
        landed, self._new = self._new, []
        rows: dict[str, list[dict[str, Any]]] = {"rollouts": []}
        rejected, funnel, timings = [], [], []
        for slot, _, _, rollouts in landed:
            outcome = group_outcome(slot.id, rollouts)
            rejected += outcome.rejected
            funnel += outcome.funnel
            timings += outcome.timings
            if self.settings.store_rollouts and outcome.at_commit is not None:
                rows["rollouts"] += outcome.at_commit(self.store)["rollouts"]
        self.store.commit(
            f"step-{row['step']}", rows=rows, rejected=rejected, funnel=funnel, timings=timings, metrics=[row]
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint holds beside the learner's state, as plain JSON."""
        return {
            "consumed": list(self.consumed),
            "filler": self.filler.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }


def environments_of(paths: Sequence[Path]) -> list[Environment]:
    """Environments of files and of run folders. UsageError where two are the same."""
    found = [e for path in paths for e in read_environments(path / "environments.jsonl" if path.is_dir() else path)]
    if len({environment.id for environment in found}) < len(found):
        raise UsageError("an environment is in two files of `environments`", "leave one of them out")
    return found


def run(config: GrpoConfig) -> dict[str, Any]:
    """Train, or continue, the run of `config.out`; a summary. The model goes to `out/model`."""
    environments = environments_of(config.environments)
    renderer = Renderer.from_folder(config.model.path)
    check_template(renderer)
    prints = {
        "environments": content_hash([environment.id for environment in environments]),
        "model": model_fingerprint(config.model.path),
    }
    hyper = GrpoHyper(**config.loss.model_dump())
    settings = settings_of(config)
    server = _preflight(config.engine.base_url)
    trainer = Trainer.build(config, grpo_loss(hyper), config.steps)  # first: a model that cannot be read begins no run
    with ExitStack() as stack:
        store = stack.enter_context(
            RunStore.open(
                config.out,
                verb="train grpo",
                config=identity(config),
                seed=config.seed,
                inputs=prints,
                files=("rollouts",),
            )
        )
        learner = PackedLearner(
            trainer,
            rows=config.batch.rows,
            budget=config.batch.budget,
            micro_batches=config.batch.micro_batches,
            segments=hyper.max_segments,
            keep_reference=hyper.kl_beta > 0,
        )
        checkpoints = Checkpoints(
            config.out / "checkpoints", trainer, fingerprint=prints["environments"], keep=config.checkpoint.keep
        )
        stack.callback(checkpoints.close)
        client, sync = _sampler(config, server, trainer, renderer, stack)
        sandbox = Sandbox()
        stack.callback(sandbox.close)
        loop = GrpoLoop(
            settings,
            environments,
            learner=learner,
            policy=TokenPolicy(
                client, renderer, sampling=Sampling(max_new_tokens=config.rollout.max_tokens), model="policy"
            ),
            opener=sandboxed(sandbox, settings.rollout.budgets),
            sync=sync,
            checkpoints=checkpoints,
            store=store,
            seed=config.seed,
        )
        asyncio.run(loop.run())
        model = trainer.export(config.out / "model")
        store.finish()
        return {
            "phase": "grpo",
            "steps": loop.version,
            "skipped": int(trainer.state.skipped),
            "dispatched": loop.filler.ledger.dispatched,
            "trained": loop.filler.ledger.trained,
            "dropped": dict(loop.filler.ledger.dropped),
            "model": str(model),
        }


def _preflight(url: str | None) -> HttpTokenClient | None:
    """A client of the configured server, which answers; None: the embedded engine is to sample."""
    if url is None:
        return None
    client = HttpTokenClient(url)

    async def check() -> None:
        try:
            await client.check()
        finally:
            await client.aclose()

    asyncio.run(check())
    return client


def _sampler(
    config: GrpoConfig, server: HttpTokenClient | None, trainer: Trainer, renderer: Renderer, stack: ExitStack
) -> tuple[TokenClient, WeightSync]:
    """Who samples: the embedded engine, or a server that reads the weights from `out/weights`."""
    if server is None:
        engine = Engine(
            (trainer.model, trainer.state.params),
            renderer,
            slots=config.engine.slots,
            max_len=config.engine.max_len,
            seed=config.seed,
        )
        stack.callback(engine.close)
        return engine.client(), InProcessSync(engine)

    def save(params: Any, folder: Path) -> None:
        save_params(params, trainer.model, folder, tokenizer_dir=trainer.tokenizer_dir)

    return server, DiskSync(server, config.out / "weights", save)
