"""Faults are drawn from (seed, episode, call index) and recorded as injected."""

from __future__ import annotations

from typing import Any

import pytest

from astrolabe.envs.executor import BackendName, Executor, ToolResult
from astrolabe.envs.faults import FAULT_KINDS, FaultPlan, fault_error
from astrolabe.records.errors import UsageError
from astrolabe.records.messages import FunctionSchema, ToolSchema


class Counting:
    name: BackendName = "mcp"
    calls = 0

    async def call(self, tool: str, arguments: dict[str, Any], *, call_id: str) -> ToolResult:
        self.calls += 1
        return ToolResult(status="ok", value=1)

    async def aclose(self) -> None:
        pass


TOOL = ToolSchema(function=FunctionSchema(name="ping", description="Pings a host."))


def test_the_same_seed_draws_the_same_faults_whatever_the_order() -> None:
    plan = FaultPlan(rate=0.3, seed=5)
    drawn = {(e, i): plan.draw(e, i) for e in ("x", "y") for i in range(50)}
    again = {(e, i): FaultPlan(rate=0.3, seed=5).draw(e, i) for i in reversed(range(50)) for e in ("y", "x")}
    assert drawn == again
    assert [drawn["x", i] for i in range(50)] != [drawn["y", i] for i in range(50)]
    assert drawn != {key: FaultPlan(rate=0.3, seed=6).draw(*key) for key in drawn}


def test_the_rate_is_kept_and_every_kind_occurs() -> None:
    drawn = [FaultPlan(rate=0.2, seed=1).draw("e", i) for i in range(2000)]
    assert 0.16 < sum(kind is not None for kind in drawn) / 2000 < 0.24
    assert {kind for kind in drawn if kind} == set(FAULT_KINDS)
    assert all(FaultPlan(rate=0.0).draw("e", i) is None for i in range(50))
    assert all(FaultPlan(rate=1.0, kinds=("timeout",)).draw("e", i) == "timeout" for i in range(50))


async def test_an_injected_fault_is_recorded_as_such_and_never_reaches_the_back_end() -> None:
    backend = Counting()
    run = Executor([TOOL], backend, faults=FaultPlan(rate=1.0, seed=0), episode="e1")
    for i in range(20):
        record, text = await run.execute(f"c{i}", i, "ping", "{}")
        assert record.injected
        assert record.status == "error"
        assert record.error is not None
        assert record.error.class_ == ("timeout" if record.error.kind == "timeout" else "infra")
        assert record.error.message in text
    assert backend.calls == 0
    assert run.infra_failure is None  # the episode is not failed for a fault that we put there


async def test_a_call_that_the_policy_wrote_wrong_draws_no_fault() -> None:
    run = Executor([TOOL], Counting(), faults=FaultPlan(rate=1.0), episode="e1")
    record, _ = await run.execute("c1", 0, "ping", '{"x": 1}')
    assert not record.injected
    assert record.error is not None
    assert record.error.class_ == "policy"


def test_a_bad_plan_is_refused() -> None:
    for options in ({"rate": 1.5}, {"rate": 0.1, "kinds": ("flood",)}, {"rate": 0.1, "kinds": ()}):
        with pytest.raises(UsageError):
            FaultPlan(**options)
    assert fault_error("malformed").kind == "malformed"
