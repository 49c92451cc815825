"""The GRPO phase: what it trains on, the gate between engine and trainer, resume, and that reward rises."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from grpo_fakes import BUDGET, grpo_learner, policy_config, shown_policy, tiny_renderer, two_tool_environment

from astrolabe.envs.sandbox import Sandbox
from astrolabe.evals.envs import evaluate
from astrolabe.model.safetensors_io import save_params
from astrolabe.records.errors import RunError, ServerError, UsageError
from astrolabe.records.run_store import RunStore
from graphs.solver import Budgets
from graphs.token_policy import TokenPolicy
from jax_train.agreement import MismatchGate, agreement
from jax_train.config import GrpoConfig
from jax_train.filler import FillerConfig
from jax_train.groups import Group, Member, RolloutConfig, Row, sandboxed
from jax_train.phases import grpo
from jax_train.phases.grpo import GrpoLoop, GrpoSettings, samples_of
from jax_train.phases.selfcritic import SelfCriticConfig
from jax_train.phases.selfcritic import run as run_selfcritic
from jax_train.rollout import rollout_file
from serving.chat import ModelFailure
from serving.engine.engine import Engine
from serving.engine.server import create_app
from serving.http import bind, launch_in_thread
from serving.render import Renderer
from serving.sync import InProcessSync
from serving.tokens import Sampling


def sampled_logprobs(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(trainer's, engine's) log-probs of 4000 ids that a faulty engine drew from random logits."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4000, 50)) * 2
    full = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    drawn_from = logits / temperature
    probs = np.exp(drawn_from - np.log(np.exp(drawn_from).sum(-1, keepdims=True)))
    if top_p < 1:
        order = np.argsort(-probs, axis=-1)
        ranked = np.take_along_axis(probs, order, -1)
        kept = np.cumsum(ranked, -1) - ranked < top_p
        np.put_along_axis(probs, order, np.where(kept, ranked, 0), -1)
        probs /= probs.sum(-1, keepdims=True)
    ids = (probs.cumsum(-1) > rng.random((4000, 1))).argmax(-1)[:, None]
    return np.take_along_axis(full, ids, -1)[:, 0], np.log(np.take_along_axis(probs, ids, -1)[:, 0])


def test_f38_the_gate_is_quiet_for_equal_mathematics_and_trips_on_a_wrong_temperature_or_top_p():
    trainer, engine = sampled_logprobs()
    noise = np.random.default_rng(1).normal(size=engine.shape) * 1e-4
    assert not MismatchGate().check(agreement(trainer, engine + noise, np.ones(4000)))
    for fault in ({"temperature": 0.6}, {"temperature": 1.5}, {"top_p": 0.8}):
        trainer, engine = sampled_logprobs(**fault)
        found = agreement(trainer, engine, np.ones(4000))
        assert found.kl > MismatchGate().warn
        with pytest.raises(RunError, match="engine and trainer disagree"):
            MismatchGate(stop=0.01).check(found)


def test_f38_a_log_prob_that_is_no_number_ends_the_run_and_masked_ones_do_not_count():
    trainer, engine = np.array([-1.0, np.nan]), np.array([-1.0, -2.0])
    assert agreement(trainer, engine, [1, 0]).kl == 0.0
    assert agreement(trainer, engine, [0, 0]).tokens == 0
    with pytest.raises(RunError):
        MismatchGate().check(agreement(trainer, engine, [1, 1]))


def member(reward: float, *rows: Row) -> Member:
    return Member(reward=reward, accuracy=reward, rows=list(rows), calls=1, errors=0, turns=1, status="finished")


def test_a_batch_trains_each_branch_with_its_rollouts_advantage_and_nothing_that_was_not_sampled():
    row = Row([5, 6, 7], [0, 1, 1], [float("nan"), -0.1, -0.2], [-1, 3, 4])
    group = Group(id="g", environment="e", members=[member(1.0, row, row), member(0.0, row), member(0.5)])
    samples, versions = samples_of([group])
    assert [sample.item for sample in samples] == ["g/0", "g/0", "g/1"]
    assert samples[0].advantage == samples[1].advantage == -samples[2].advantage > 0
    assert versions[0].tolist() == [-1, 3, 4]
    assert samples[0].mask.tolist() == [0, 1, 1]


class Folder:
    """Checkpoints of a learner kept as copies in memory, with `extra` through JSON."""

    def __init__(self, learner: Any) -> None:
        self.learner, self.saved = learner, None

    def save(self, step: int, extra: dict) -> None:
        self.saved = (step, json.dumps(extra), jax.tree.map(np.asarray, self.learner.trainer.state))

    def restore(self):
        if self.saved is None:
            return None
        step, extra, state = self.saved
        self.learner.trainer.state = jax.tree.map(jax.numpy.asarray, state)
        return step, json.loads(extra)


@pytest.fixture(scope="module")
def policy():
    renderer = tiny_renderer()
    return renderer, *shown_policy(renderer)


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(workers=2)
    yield box
    box.close()


async def train(
    policy, sandbox, folder: Path, *, steps: int, until: int | None = None, saved: Any = None, synchronous: bool = True
):
    """A run of the real loop; (learner, checkpoints, loop, rows of metrics)."""
    renderer, config, params = policy
    learner = grpo_learner(config, params)
    checkpoints = Folder(learner)
    checkpoints.saved = saved
    rollout = RolloutConfig(n=6, budgets=Budgets(max_turns=3, max_tokens=90, max_context=BUDGET), attempts=1)
    settings = GrpoSettings(
        steps=steps,
        filler=FillerConfig(target=2),
        rollout=rollout,
        gate=MismatchGate(warn=1e-4, stop=1e-3),
        checkpoint_every=1,
        synchronous=synchronous,
    )
    with (
        Engine((config, params), renderer, slots=8, max_len=BUDGET) as engine,
        RunStore.open(folder, verb="train grpo", config={}, seed=0, files=("rollouts",)) as store,
    ):
        loop = GrpoLoop(
            settings,
            [two_tool_environment(i) for i in range(3)],
            learner=learner,
            policy=TokenPolicy(engine.client(), renderer, sampling=Sampling(max_new_tokens=40)),
            opener=sandboxed(sandbox, rollout.budgets),
            sync=InProcessSync(engine),
            checkpoints=checkpoints,
            store=store,
            seed=4,
        )
        await loop.run(until=until, progress=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return learner, checkpoints, loop, rows


@pytest.mark.slow
async def test_reward_rises_and_engine_and_trainer_agree(policy, sandbox, tmp_path):
    _, _, loop, rows = await train(policy, sandbox, tmp_path / "run", steps=8)
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards
    assert max(row["mismatch_max"] for row in rows) < 1e-3
    assert all(row["staleness_max"] <= 1 for row in rows)
    assert all(row["trained_rollouts"] == 12 for row in rows)
    assert loop.filler.balance() == 0
    stored = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert len(stored) == sum(row["rollouts"] for row in rows)


def repeatable(row: dict) -> dict:
    """Without what clocks say, and the last bits of the engine's log-probs."""
    return {k: v for k, v in row.items() if not k.endswith("_s") and "per_s" not in k and not k.startswith("mismatch_")}


@pytest.mark.slow
async def test_f47_a_killed_run_goes_on_to_the_same_tokens_losses_and_weights(policy, sandbox, tmp_path):
    whole, _, loop, rows = await train(policy, sandbox, tmp_path / "whole", steps=4)
    _, checkpoints, _, _ = await train(policy, sandbox, tmp_path / "parts", steps=4, until=2)
    resumed, _, again, pieces = await train(policy, sandbox, tmp_path / "parts", steps=4, saved=checkpoints.saved)
    assert again.consumed == loop.consumed
    assert [repeatable(row) for row in pieces] == [repeatable(row) for row in rows]
    for one, two in zip(jax.tree.leaves(whole.trainer.state), jax.tree.leaves(resumed.trainer.state), strict=True):
        assert (np.asarray(one) == np.asarray(two)).all()
    for name in ("rollouts.jsonl", "rejected.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


@pytest.fixture(scope="module")
def folder(policy, tmp_path_factory) -> Path:
    """The policy as a model folder."""
    renderer, config, params = policy
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.json").write_text(renderer.tokenizer._full.to_str())
    return save_params(params, config, path)


def phase_config(folder: Path, tmp_path: Path, **more: Any) -> GrpoConfig:
    environments = tmp_path / "environments.jsonl"
    environments.write_text("".join(two_tool_environment(i).to_line() + "\n" for i in range(3)))
    tree = {
        "model": {"path": folder},
        "out": tmp_path / "run",
        "environments": [environments],
        "steps": 3,
        "batch": {"rows": 2, "budget": BUDGET},
        "filler": {"target": 2},
        "rollout": {"n": 4, "max_turns": 3, "max_tokens": 60, "attempts": 1},
        "engine": {"slots": 8, "max_len": BUDGET},
        "checkpoint": {"every": 2},
        "optimizer": {"lr": 1e-4, "schedule": "constant"},
    }
    return GrpoConfig.model_validate(tree | more)


@pytest.mark.parametrize(
    ("weights", "url", "error", "said"),
    [
        (b"", "http://127.0.0.1:{port}", ServerError, "no model server answers"),
        (b"0" * 99, None, UsageError, "damaged"),
    ],
)
def test_a_server_that_is_gone_or_a_damaged_model_begins_no_run(tmp_path, weights, url, error, said):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(tiny_renderer().tokenizer._full.to_str())
    (model / "config.json").write_text(json.dumps(policy_config().to_hf()))
    if weights:
        (model / "model.safetensors").write_bytes(weights)
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    config = phase_config(model, tmp_path, engine={"base_url": url and url.format(port=port), "max_len": BUDGET})
    with pytest.raises(error, match=said):
        grpo.run(config)
    assert not config.out.exists()


async def test_a_server_that_does_not_take_the_weights_ends_the_run_with_its_reason(tmp_path):
    class Refusing:
        async def push(self, params: Any, version: int) -> None:
            raise ModelFailure("unreachable", "http://127.0.0.1:9: connection refused")

    fakes: Any = SimpleNamespace(params=None, restore=lambda: None)
    settings = GrpoSettings(steps=1, filler=FillerConfig(target=1), rollout=RolloutConfig(n=2, budgets=Budgets()))
    with RunStore.open(tmp_path / "run", verb="train grpo", config={}, seed=0) as store:
        loop = GrpoLoop(
            settings,
            [two_tool_environment()],
            learner=fakes,
            policy=fakes,
            opener=fakes,
            sync=Refusing(),
            checkpoints=fakes,
            store=store,
            seed=0,
        )
        with pytest.raises(ServerError, match=r"did not take the weights of step 0.*connection refused"):
            await loop.run(progress=False)


@pytest.mark.slow
def test_the_phase_runs_from_a_configuration_and_its_model_loads(folder, tmp_path):
    config = phase_config(folder, tmp_path)
    summary = grpo.run(config)
    assert summary["steps"] == 3
    assert summary["trained"] == 6
    assert Renderer.from_folder(summary["model"]).vocab_size > 0
    with Engine(Path(summary["model"]), slots=1, max_len=64):
        pass
    rows = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert grpo.run(config) == summary  # a finished run has nothing left to do
    changed = config.model_copy(update={"normalise_std": False})
    with pytest.raises(RunError, match="normalise_std: true -> false"):
        grpo.run(changed)


@pytest.mark.slow
async def test_asynchronous_rollouts_stay_within_the_staleness_bound(policy, sandbox, tmp_path):
    _, _, loop, rows = await train(policy, sandbox, tmp_path / "run", steps=4, synchronous=False)
    assert all(row["staleness_max"] <= 1 for row in rows)
    assert all(row["trained_rollouts"] == 12 for row in rows)
    assert loop.filler.balance() == 0


@pytest.mark.slow
def test_a_served_policy_is_rolled_out_and_evaluated_as_the_one_in_process(folder, tmp_path):
    environments = tmp_path / "environments.jsonl"
    environments.write_text("".join(two_tool_environment(i).to_line() + "\n" for i in range(2)))
    limits = {"max_new_tokens": 40, "budgets": Budgets(max_turns=3, max_tokens=90), "progress": False}
    inside = evaluate(environments, model=folder, n=2, temperature=1.0, **limits)
    renderer = Renderer.from_folder(folder)
    with Engine(folder, renderer, slots=4) as engine, launch_in_thread(create_app(engine)) as server:
        outside = evaluate(environments, server.url, n=2, temperature=1.0, **limits)
        report = rollout_file(environments, server.url, 2, tmp_path / "run", **limits)
    assert outside == inside
    assert report.rows == {"rollouts": 4, "rejected": 0}
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert all(row["traces"][0]["length"] > 100 for row in rows)


@pytest.mark.slow
def test_the_self_critic_round_learns_from_the_policys_own_pairs_and_continues(folder, tmp_path):
    grpo_config = phase_config(folder, tmp_path)
    config = SelfCriticConfig(
        **grpo_config.model_dump(include={"model", "environments", "rollout", "engine", "optimizer"}),
        out=tmp_path / "critic",
        batch={"rows": 2, "budget": 2 * BUDGET},
        steps=3,
    )
    summary = run_selfcritic(config)
    assert summary["pairs"] > 0
    pairs = [json.loads(line) for line in (config.rollouts / "preferences.jsonl").read_text().splitlines()]
    assert len(pairs) == summary["pairs"]
    assert all(pair["chosen"]["reward"] > pair["rejected"]["reward"] for pair in pairs)
    assert (Path(summary["model"]) / "model.safetensors").is_file()
    before = (config.rollouts / "rollouts.jsonl").read_bytes()
    assert run_selfcritic(config)["pairs"] == summary["pairs"]
    assert (config.rollouts / "rollouts.jsonl").read_bytes() == before
