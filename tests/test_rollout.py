"""Rollouts: groups that are scored from executor records, failures that are never 0, and runs that continue."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pytest
from rollout_fakes import Server, make_renderer, toy_environment

from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.environment import read_environments
from astrolabe.records.errors import ServerError, UsageError
from astrolabe.records.run_store import RunStore
from astrolabe.records.token_store import TokenStore
from astrolabe.records.trajectory import Trajectory
from graphs.solver import Budgets, PolicyFailure
from graphs.token_policy import Branch, TokenPolicy
from jax_train.groups import Group, RolloutConfig, Row, roll, roll_group, sandboxed
from jax_train.rollout import roll_into, rollout_file
from serving.tokens import Sampling


def call(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(workers=2)
    yield box
    box.close()


@pytest.fixture(scope="module")
def renderer():
    return make_renderer()


class Habits:
    """A token server whose answer depends only on the seed and the turn: each episode plays one of the scripts."""

    def __init__(self, renderer, scripts):
        self.renderer, self.scripts, self.version = renderer, scripts, 0
        self.turns: dict[tuple[int, ...], int] = {}

    async def generate(self, input_ids, sampling, *, rid=None):
        text = self.renderer.decode(input_ids)
        turn = text.count("<tool_response>")
        script = self.scripts[self._episode(text, sampling) % len(self.scripts)]
        step = script[min(turn, len(script) - 1)]
        if isinstance(step, Exception):
            raise step
        return await Server(self.renderer, [step]).generate(input_ids, sampling)

    def _episode(self, text: str, sampling: Sampling) -> int:
        if "<tool_response>" not in text:
            return sampling.seed
        return 0 if "<tool_call>" in text.split("<|im_start|>assistant")[1] else 1

    async def abort(self, rid=None): ...


async def test_a_group_has_n_rollouts_scored_from_the_executors_records(sandbox, renderer):
    environment = toy_environment()
    server = Habits(renderer, [[call(111, 222), "It is 333.<|im_end|>"], ["Maybe 333.<|im_end|>"]])
    config = RolloutConfig(n=6)
    policy = TokenPolicy(server, renderer)
    rollouts = await roll_group(environment, policy, sandboxed(sandbox, config.budgets), config, seed=5)
    rewards = [r.trajectory.reward for r in rollouts]
    assert {(r.value, r.calls, r.targets, r.answer_correct) for r in rewards} == {(1.0, 1, 1, True), (0.0, 0, 1, True)}
    assert len({r.trajectory.group for r in rollouts}) == 1
    assert all(r.trajectory.task.environment == environment.id for r in rollouts)
    assert [r.index for r in rollouts] == list(range(6))
    group = Group.of("g", environment, rollouts)
    assert group.values("reward") == [r.value for r in rewards]
    assert group.values("accuracy") == [1.0] * 6


async def test_the_answer_can_be_the_reward(sandbox, renderer):
    config = RolloutConfig(n=2, reward="answer")
    policy = TokenPolicy(Habits(renderer, [["Maybe 333.<|im_end|>"]]), renderer)
    rollouts = await roll_group(toy_environment(), policy, sandboxed(sandbox, config.budgets), config, seed=5)
    assert {(r.trajectory.reward.kind, r.trajectory.reward.value) for r in rollouts} == {("answer", 1.0)}


class Failing:
    """Fails the first `times` episodes with what is given, then answers."""

    def __init__(self, failure: Exception, times: int) -> None:
        self.failure, self.left, self.seeds = failure, times, []

    async def act(self, episode):
        from astrolabe.records.messages import Message
        from graphs.solver import Turn

        self.seeds.append(episode.seed)
        if self.left:
            self.left -= 1
            raise self.failure
        return Turn(message=Message(role="assistant", content="333"))


@pytest.mark.parametrize("failure", [PolicyFailure("unreachable"), ZeroDivisionError("a bug")], ids=["infra", "bug"])
async def test_f42_a_failed_rollout_is_tried_again_under_another_seed_and_accounted_for(sandbox, failure):
    config = RolloutConfig(n=1, attempts=3)
    policy = Failing(failure, times=2)
    rollout = await roll(toy_environment(), policy, sandboxed(sandbox, config.budgets), config, seed=1)
    assert (rollout.attempts, rollout.scored, len(set(policy.seeds))) == (3, True, 3)


async def test_e36_a_rollout_that_keeps_failing_has_no_reward_and_is_left_out_of_its_group(sandbox):
    config = RolloutConfig(n=4, attempts=2)
    environment = toy_environment()
    policy = Failing(PolicyFailure("server_error"), times=5)
    rollouts = await roll_group(environment, policy, sandboxed(sandbox, config.budgets), config, seed=1)
    group = Group.of("g", environment, rollouts)
    assert group.failed == {"model_server_error": 1}
    assert len(group.members) == 3


async def test_a_dead_server_ends_the_run_and_leaves_the_environment_to_do(sandbox):
    config = RolloutConfig(n=2, attempts=2)
    with pytest.raises(ServerError, match="cannot be reached"):
        await roll_group(
            toy_environment(),
            Failing(PolicyFailure("unreachable"), times=99),
            sandboxed(sandbox, config.budgets),
            config,
            seed=1,
        )


async def test_f44_a_hung_opening_or_scoring_does_not_outlive_the_deadline(sandbox, monkeypatch):
    class Hung:
        async def act(self, episode):
            await asyncio.sleep(60)

    config = RolloutConfig(n=1, attempts=1, budgets=Budgets(wall_s=0.1))
    rollout = await roll(toy_environment(), Hung(), sandboxed(sandbox, config.budgets), config, seed=1)
    assert (rollout.scored, rollout.trajectory.failure) == (False, "deadline")


async def test_f43_a_verifier_that_times_out_twice_leaves_the_rollout_out(sandbox, monkeypatch):
    import time

    monkeypatch.setattr("jax_train.groups.score_f1", lambda *a: time.sleep(0.3))
    config = RolloutConfig(n=1, attempts=1, score_s=0.05)
    rollout = await roll(
        toy_environment(), Failing(PolicyFailure("x"), 0), sandboxed(sandbox, config.budgets), config, seed=1
    )
    assert (rollout.scored, rollout.trajectory.failure) == (False, "verifier_timeout")


async def test_e36_the_policys_own_spent_budget_is_scored_as_it_stands(sandbox, renderer):
    policy = TokenPolicy(Habits(renderer, [[call(1, 1), call(111, 222)]]), renderer)
    config = RolloutConfig(n=1, budgets=Budgets(max_turns=3))
    rollout = await roll(toy_environment(), policy, sandboxed(sandbox, config.budgets), config, seed=1)
    assert (rollout.trajectory.status, rollout.trajectory.reward.value) == ("truncated", 2 / 4)


async def test_e46_interleaved_episodes_do_not_see_each_others_state(sandbox):
    from astrolabe.envs.python_env import open_episode

    row = toy_environment().to_json()
    row["tools"][0] |= {"code": "def add(a, b, *, state):\n    state['n'] = state['n'] + a\n    return state['n']\n"}
    environment = type(toy_environment()).model_validate(row | {"mode": "stateful", "state": {"n": 0}})
    one, two = open_episode(environment, sandbox), open_episode(environment, sandbox)
    for executor, call_id in ((one, "1"), (two, "1"), (one, "2")):
        await executor.execute(call_id, 0, "add", '{"a": 5, "b": 0}')
    assert (one.backend.state, two.backend.state) == ({"n": 10}, {"n": 5})


async def test_a_run_of_rollouts_holds_rows_with_traces_and_their_tokens_and_continues(sandbox, renderer, tmp_path):
    environments = [toy_environment(), toy_environment(112)]
    scripts = [[call(111, 222), "It is 333.<|im_end|>"], ["Maybe 333.<|im_end|>"]]
    config = RolloutConfig(n=3)

    async def run(folder, todo):
        policy = TokenPolicy(Habits(renderer, scripts), renderer)
        with RunStore.open(folder, verb="rollout", config={}, seed=1, files=("rollouts",)) as store:
            opener = sandboxed(sandbox, config.budgets)
            await roll_into(store, todo, policy, opener, config, seed=9, progress=False)

    await run(tmp_path / "whole", environments)
    await run(tmp_path / "parts", environments[:1])
    await run(tmp_path / "parts", environments)
    whole = (tmp_path / "whole" / "rollouts.jsonl").read_text()
    assert whole == (tmp_path / "parts" / "rollouts.jsonl").read_text()
    rows = [Trajectory.model_validate(json.loads(line)) for line in whole.splitlines()]
    assert len(rows) == 6
    tokens = TokenStore(tmp_path / "whole" / "tokens", read_only=True)
    for row in rows:
        trace = row.traces[0]
        arrays = tokens.read(trace.start, trace.length)
        assert trace.segments[-1].end == trace.length
        assert np.isnan(arrays.logprobs[arrays.mask == 0]).all()
        text = renderer.decode([t for t, m in zip(arrays.tokens.tolist(), arrays.mask.tolist(), strict=True) if m])
        assert text.endswith(f"{row.messages[-1].content}<|im_end|>")


async def test_failed_rollouts_are_rejected_rows_with_their_reason(sandbox, tmp_path):
    config = RolloutConfig(n=2, attempts=1)
    policy = Failing(PolicyFailure("abort"), times=1)
    with RunStore.open(tmp_path / "run", verb="rollout", config={}, seed=1) as store:
        opener = sandboxed(sandbox, config.budgets)
        await roll_into(store, [toy_environment()], policy, opener, config, seed=9, progress=False)
    rejected = [json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert [row["reasons"] for row in rejected] == [["infra_model_abort"]]
    funnel = json.loads((tmp_path / "run" / "funnel.json").read_text())
    assert funnel[0] == {"stage": "rollout", "in": 2, "out": 1, "rejected": {"infra_model_abort": 1}}


async def test_a_group_survives_json_exactly(sandbox, renderer):
    environment, config = toy_environment(), RolloutConfig(n=2)
    policy = TokenPolicy(Habits(renderer, [[call(111, 222), "333.<|im_end|>"]]), renderer)
    rollouts = await roll_group(environment, policy, sandboxed(sandbox, config.budgets), config, seed=5)
    group = Group.of("g", environment, rollouts)
    again = Group.from_json(json.loads(json.dumps(group.to_json())))
    assert again.to_json() == group.to_json()
    row, same = group.members[0].rows[0], again.members[0].rows[0]
    assert [math.isnan(x) for x in row.logprobs] == [math.isnan(x) for x in same.logprobs]
    assert row.versions == same.versions


def test_e45_a_row_ends_with_its_last_sampled_token_so_that_it_fits_the_context():
    branch = Branch(
        tokens=[1, 2, 3, 4], mask=[0, 1, 0, 0], logprobs=[math.nan, -0.1, math.nan, math.nan], versions=[-1, 0, -1, -1]
    )
    assert (Row.of(branch).tokens, Row.of(branch).mask, Row.of(branch).versions) == ([1, 2], [0, 1], [-1, 0])
    assert Row.of(Branch(tokens=[1], mask=[0], logprobs=[math.nan], versions=[-1])).tokens == []


def test_bad_files_and_dead_servers_are_errors_with_a_mend(tmp_path):
    file = tmp_path / "envs.jsonl"
    file.write_text(toy_environment().to_line() + "\n{}\n")
    with pytest.raises(UsageError, match="line 2: no environment"):
        read_environments(file)
    file.write_text((toy_environment().to_line() + "\n") * 2)
    with pytest.raises(UsageError, match=r"line 2: env-.* is there twice"):
        read_environments(file)
    file.write_text(toy_environment().to_line() + "\n")
    with pytest.raises(ServerError, match="no model server answers"):
        rollout_file(file, "http://127.0.0.1:9", 2, tmp_path / "run", progress=False)
