"""Preference pairs from the policy's own rollouts: one prompt, a clear gap, tokens shared exactly up to the fork."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rollout_fakes import Server, make_renderer, toy_environment

from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.errors import RunError, UsageError
from astrolabe.records.messages import Message
from astrolabe.records.preference import Preference
from astrolabe.records.run_store import RunStore
from astrolabe.records.token_store import TokenStore
from astrolabe.records.trajectory import Reward, Task, Trace, Trajectory
from graphs.solver import Budgets
from graphs.token_policy import TokenPolicy
from jax_train.groups import RolloutConfig, sandboxed
from jax_train.pairs import Candidate, PairConfig, mine_pairs, read_candidates, shared_prefix
from jax_train.rollout import roll_into


def candidate(reward: float, said: list[int], *, group: str = "g", text: str = "") -> Candidate:
    prompt = [1, 2, 3]
    trajectory = Trajectory(
        task=Task(question="q"),
        messages=[Message(role="user", content="q"), Message(role="assistant", content=text or str(said))],
        group=group,
        reward=Reward(value=reward),
        traces=[Trace(start=0, length=3 + len(said))],
    )
    return Candidate(trajectory, np.array(prompt + said), np.array([0] * 3 + [1] * len(said)))


def test_pairs_are_of_one_group_with_a_gap_above_the_threshold_and_the_better_one_is_chosen():
    rows = [candidate(1.0, [5]), candidate(0.95, [6]), candidate(0.2, [7]), candidate(0.0, [8], group="other")]
    (pair,) = mine_pairs(rows, PairConfig(min_gap=0.1))
    assert (pair.chosen.reward, pair.rejected.reward, pair.fork, pair.group) == (1.0, 0.2, 3, "g")
    assert [m.role for m in pair.prompt] == ["user"]
    assert [m.role for m in pair.chosen.messages] == ["assistant"]


def test_pairs_that_part_late_come_first_and_a_rollout_is_used_once():
    rows = [candidate(1.0, [5, 6, 7]), candidate(0.5, [9]), candidate(0.0, [5, 6, 8]), candidate(0.1, [9, 4])]
    pairs = mine_pairs(rows, PairConfig())
    assert [(p.chosen.reward, p.rejected.reward, p.fork) for p in pairs] == [(1.0, 0.0, 5)]
    assert len(mine_pairs(rows[:1] * 3 + rows[1:2] * 3, PairConfig(max_per_group=2))) == 2


def test_the_less_wrong_of_two_wrong_ones_is_no_example():
    rows = [candidate(0.3, [5]), candidate(0.0, [6])]
    assert mine_pairs(rows, PairConfig(min_chosen=0.5)) == []
    assert len(mine_pairs(rows, PairConfig(min_chosen=0.0))) == 1


def test_sides_that_differ_in_no_sampled_token_are_no_pair():
    assert mine_pairs([candidate(1.0, [5]), candidate(0.0, [5])], PairConfig()) == []
    assert mine_pairs([candidate(1.0, [5, 6]), candidate(0.0, [5])], PairConfig()) == []


def test_shared_prefix_counts_tokens():
    assert shared_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert shared_prefix(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert shared_prefix(np.array([9]), np.array([1])) == 0


def call(a: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 222}}}}\n</tool_call><|im_end|>'


class Wavering:
    """Calls rightly or wrongly by the seed."""

    def __init__(self, renderer) -> None:
        self.renderer = renderer

    async def generate(self, input_ids, sampling, *, rid=None):
        text = self.renderer.decode(input_ids)
        turn = "Done.<|im_end|>" if "<tool_response>" in text else call(111 if sampling.seed % 2 else 7)
        return await Server(self.renderer, [turn]).generate(input_ids, sampling)

    async def abort(self, rid=None): ...


async def test_pairs_of_a_run_share_their_first_tokens_exactly_and_validate_as_records(tmp_path):
    renderer, config = make_renderer(), RolloutConfig(n=6)
    sandbox = Sandbox(workers=1)
    with RunStore.open(tmp_path / "run", verb="rollout", config={}, seed=1) as store:
        opener = sandboxed(sandbox, Budgets())
        policy = TokenPolicy(Wavering(renderer), renderer)
        await roll_into(store, [toy_environment()], policy, opener, config, seed=3, progress=False)
        tokens = store.tokens
    sandbox.close()
    pairs = mine_pairs(read_candidates(tmp_path / "run"), PairConfig())
    assert pairs
    for pair in pairs:
        assert Preference.model_validate(json.loads(pair.to_line())).id == pair.id
        one, two = (tokens.read(s.trace["start"], s.trace["length"]) for s in (pair.chosen, pair.rejected))
        assert (one.tokens[: pair.fork] == two.tokens[: pair.fork]).all()
        assert one.tokens[pair.fork] != two.tokens[pair.fork]
        assert one.mask[: pair.fork].sum() > 0  # they part inside the call, after its sampled head
        assert pair.chosen.reward == 1.0


def test_a_run_without_tokens_says_how_to_get_them(tmp_path):
    with pytest.raises(RunError, match="--model DIR"):
        read_candidates(tmp_path)


def test_a_rollout_of_the_wrong_form_or_outside_the_tokens_is_named(tmp_path):
    TokenStore(tmp_path / "tokens").append([1], [1], [-0.5], [0])
    (tmp_path / "rollouts.jsonl").write_text('{"task": 5}\n')
    with pytest.raises(UsageError, match=r"rollouts\.jsonl, line 1: no trajectory: task"):
        read_candidates(tmp_path)
    row = candidate(1.0, [1]).trajectory.model_copy(update={"traces": [Trace(start=0, length=9)]})
    (tmp_path / "rollouts.jsonl").write_text(row.to_line() + "\n")
    with pytest.raises(RunError, match="not within its 1 tokens"):
        read_candidates(tmp_path)
