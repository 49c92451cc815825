"""Evaluation on environments: figures per environment, intervals over environments, paired comparison."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
from rollout_fakes import Server, make_renderer, toy_environment

from astrolabe.envs.sandbox import Sandbox
from astrolabe.evals.envs import compare, evaluate_policy, interval, paired_difference, summary_lines
from astrolabe.records.errors import Interrupted, RunError, ServerError, UsageError
from graphs.solver import Budgets, PolicyFailure
from graphs.token_policy import TokenPolicy
from jax_train.groups import sandboxed

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 111, "b": 222}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def opener():
    box = Sandbox(workers=1)
    yield sandboxed(box, Budgets())
    box.close()


class Fixed:
    """Always calls for 111 + 222, then says 333."""

    def __init__(self, renderer, failing: str = "") -> None:
        self.renderer, self.failing = renderer, failing

    async def generate(self, input_ids, sampling, *, rid=None):
        text = self.renderer.decode(input_ids)
        if self.failing and self.failing in text:
            raise PolicyFailure("server_error")
        turn = "It is 333.<|im_end|>" if "<tool_response>" in text.split("<|im_start|>user")[-1] else CALL
        return await Server(self.renderer, [turn]).generate(input_ids, sampling)

    async def abort(self, rid=None): ...


async def test_figures_are_means_over_environments_with_intervals(opener, tmp_path):
    renderer = make_renderer()
    environments = [toy_environment(), toy_environment(500, 1)]
    policy = TokenPolicy(Fixed(renderer), renderer)
    result = await evaluate_policy(environments, policy, opener, n=2, out=tmp_path / "run", progress=False)
    assert (result["environments"], result["episodes"], result["failed"]) == (2, 4, 0)
    assert result["f1"] == {"mean": 0.5, "low": 0.0, "high": 1.0}
    assert result["answer_accuracy"]["mean"] == 0.5
    assert result["calls"]["mean"] == 1.0
    assert result["per_environment"][environments[1].id]["f1"] == 0.0
    assert json.loads((tmp_path / "run" / "eval.json").read_text()) == result
    again = await evaluate_policy(environments, policy, opener, n=2, out=tmp_path / "run", progress=False)
    assert again == result
    assert "2 environments, 4 episodes" in summary_lines(result)[0]


async def test_failed_episodes_are_counted_and_not_scored(opener):
    renderer = make_renderer()
    environments = [toy_environment(), toy_environment(500, 1)]
    policy = TokenPolicy(Fixed(renderer, failing="500"), renderer)
    result = await evaluate_policy(environments, policy, opener, progress=False)
    assert (result["environments"], result["failed"], result["f1"]["mean"]) == (1, 1, 1.0)
    with pytest.raises(ServerError, match="no episode could be scored"):
        await evaluate_policy(environments[1:], policy, opener, progress=False)


async def test_an_evaluation_that_was_stopped_has_no_result(opener, tmp_path):
    renderer = make_renderer()

    class Stopping(Fixed):
        async def generate(self, input_ids, sampling, *, rid=None):
            if not self.failing:  # a second one would stop the tests
                self.failing = "nothing"
                os.kill(os.getpid(), signal.SIGINT)
            return await super().generate(input_ids, sampling, rid=rid)

    environments = [toy_environment(n, n) for n in range(1, 7)]
    policy = TokenPolicy(Stopping(renderer), renderer)
    with pytest.raises(Interrupted) as stopped:
        await evaluate_policy(environments, policy, opener, out=tmp_path / "run", concurrency=1, progress=False)
    assert stopped.value.exit_code == 3
    assert not (tmp_path / "run" / "eval.json").exists()


async def test_another_policy_cannot_go_on_with_an_evaluation(opener, tmp_path):
    renderer = make_renderer()
    policy = TokenPolicy(Fixed(renderer), renderer)
    for name in ("one", "one"):
        await evaluate_policy(
            [toy_environment()], policy, opener, out=tmp_path / "run", identity={"policy": name}, progress=False
        )
    with pytest.raises(RunError, match="another run"):
        await evaluate_policy(
            [toy_environment()], policy, opener, out=tmp_path / "run", identity={"policy": "two"}, progress=False
        )


def test_intervals_hold_the_mean_and_shrink_with_more_environments():
    rng = np.random.default_rng(0)
    few, many = interval(rng.random(20)), interval(rng.random(2000))
    for figure in (few, many):
        assert figure["low"] < figure["mean"] < figure["high"]
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 3
    assert interval([0.5] * 9) == {"mean": 0.5, "low": 0.5, "high": 0.5}


def test_a_paired_comparison_sees_what_an_unpaired_one_would_not():
    rng = np.random.default_rng(0)
    difficulty = rng.random(200)
    a, b = difficulty, difficulty + 0.02 + 0.01 * rng.standard_normal(200)
    paired = paired_difference(a, b)
    assert 0 < paired["low"] < 0.02 < paired["high"]
    assert interval(b)["low"] < interval(a)["high"]
    seeds = paired_difference([a, a, a], [b, b + 0.1, b - 0.1])
    assert seeds["low"] < 0 < seeds["high"]
    with pytest.raises(ValueError, match="shapes"):
        paired_difference([1, 2], [1, 2, 3])


def test_comparing_uses_the_environments_that_both_have():
    def result(**f1: float) -> dict:
        return {"per_environment": {name: {"f1": value} for name, value in f1.items()}}

    assert compare(result(a=0.0, b=1.0), result(a=0.5, c=1.0))["mean"] == 0.5
    with pytest.raises(UsageError, match="share no environment"):
        compare(result(a=1.0), result(b=1.0))
