"""The self-critic round (Tool-Star): the policy's own rollouts are scored, paired, and learnt from by DPO.

    rollouts of the present policy, in its run folder -> pairs of one group with a gap in reward -> DPO against the
    policy as it was -> out/model

The reference is the policy that rolled out, so both sides of every pair are its own samples. The optimizer starts anew:
moments of another loss are no guide to this one. Killed and started again, the round goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field

from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.environment import Environment
from astrolabe.records.errors import RunError
from astrolabe.records.ids import content_hash, seed_for
from astrolabe.records.run_store import RunStore, read_journal
from graphs.token_policy import TokenPolicy
from jax_train.config import (
    DpoConfig,
    DpoData,
    DpoLossSection,
    GrpoEngineSection,
    GrpoRolloutSection,
    Section,
    TrainConfig,
)
from jax_train.groups import sandboxed
from jax_train.pairs import PairConfig, mine_pairs, read_candidates
from jax_train.phases.dpo import run as run_dpo
from jax_train.phases.grpo import environments_of, rollout_config
from jax_train.rollout import roll_into
from jax_train.trainer import model_fingerprint
from serving.engine.engine import Engine
from serving.render import Renderer
from serving.tokens import Sampling

log = logging.getLogger(__name__)


class PairSection(Section):
    min_gap: float = Field(default=0.1, gt=0)
    min_chosen: float = 0.0
    max_per_group: int = Field(default=4, ge=1)


class SelfCriticConfig(TrainConfig):
    environments: list[Path] = Field(min_length=1)
    """Environment files (JSONL) or run folders that hold environments.jsonl."""
    rollout: GrpoRolloutSection = GrpoRolloutSection()
    engine: GrpoEngineSection = GrpoEngineSection()
    pairs: PairSection = PairSection()
    loss: DpoLossSection = DpoLossSection()
    steps: int | None = Field(default=None, ge=1)
    """DPO steps; None: by `epochs`."""
    epochs: float = Field(default=1.0, gt=0)

    @property
    def rollouts(self) -> Path:
        """The run of the rollouts and their pairs."""
        return self.out / "rollouts"


def run(config: SelfCriticConfig) -> dict[str, Any]:
    """Roll out, pair, train; a summary with DPO's own. RunError if the rollouts hold no pair."""
    environments = environments_of(config.environments)
    pairs = mine(config, environments)
    if pairs == 0:
        raise RunError(
            f"{config.rollouts}: no two rollouts of a group differ in reward by {config.pairs.min_gap:g}",
            "give harder environments or a larger rollout.n, or lower pairs.min_gap",
        )
    common = config.model_dump(exclude={"environments", "rollout", "engine", "pairs", "out"})
    summary = run_dpo(DpoConfig(**common, out=config.out / "dpo", data=DpoData(preferences=config.rollouts)))
    return {**summary, "phase": "selfcritic", "pairs": pairs}


def mine(config: SelfCriticConfig, environments: list[Environment]) -> int:
    """Rollouts of `config.model` in its run folder, and `preferences.jsonl` beside them; the number of pairs."""
    renderer = Renderer.from_folder(config.model.path)
    rollout = rollout_config(config.rollout, max_context=min(config.batch.budget // 2, config.engine.max_len))
    identity = {
        "rollout": config.rollout.model_dump(),
        "max_context": rollout.budgets.max_context,
        "pairs": config.pairs.model_dump(),
    }
    prints = {
        "environments": content_hash([environment.id for environment in environments]),
        "model": model_fingerprint(config.model.path),
    }
    with ExitStack() as stack:
        engine = None
        journal, _ = read_journal(config.rollouts)
        if not any(entry.get("item") == "pairs" for entry in journal):  # first: a model that does not load makes no run
            engine = Engine(config.model.path, renderer, slots=config.engine.slots, max_len=config.engine.max_len)
            stack.callback(engine.close)
        store = stack.enter_context(
            RunStore.open(
                config.rollouts,
                verb="selfcritic rollouts",
                config=identity,
                seed=config.seed,
                inputs=prints,
                files=("rollouts", "preferences"),
            )
        )
        if engine is not None:
            sandbox = Sandbox()
            stack.callback(sandbox.close)
            sampling = Sampling(max_new_tokens=config.rollout.max_tokens)
            report = asyncio.run(
                roll_into(
                    store,
                    environments,
                    TokenPolicy(engine.client(), renderer, sampling=sampling),
                    sandboxed(sandbox, rollout.budgets),
                    rollout,
                    seed=seed_for(config.seed, "selfcritic"),
                    concurrency=config.rollout.max_in_flight,
                )
            )
            if report.interrupted:
                raise RunError(f"{config.rollouts}: interrupted", "run the same command again: it goes on")
            candidates = read_candidates(config.rollouts)
            pairs = mine_pairs(candidates, PairConfig(**config.pairs.model_dump()))
            rows = [pair.to_json() for pair in pairs]
            store.commit("pairs", rows={"preferences": rows}, funnel=[("pairs", len(candidates), len(pairs), {})])
            log.info("%d pairs from %d rollouts", len(pairs), len(candidates))
        store.finish()
        return sum(1 for _ in (config.rollouts / "preferences.jsonl").open("rb"))
