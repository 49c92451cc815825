"""What the dynamic gates look at: executions of an environment's tools, each made once and kept.

A golden is first replayed in a process of its own, in the oracle's order, as the executor would run it. Probes of a
tool run together in one child. Everything is memoised by tool, arguments and state, so that the gates can ask for the
same call again (in another order, by another policy) without paying for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from astrolabe.envs.arguments import whole_numbers
from astrolabe.envs.faults import call_error
from astrolabe.envs.gates.graph import topological_orders
from astrolabe.envs.gates.probes import Candidates, Probe, fingerprint, unique
from astrolabe.envs.rewards.f1 import f1_of_calls
from astrolabe.envs.sandbox import Execution, Sandbox
from astrolabe.records.environment import Environment, EnvTool, Golden
from astrolabe.records.equality import equal
from astrolabe.records.ids import rng_for
from astrolabe.records.trajectory import CallRecord, Reward

GOLDEN_CPU_S = 2.0
PROBE_CPU_S = 0.5
_FIRST_CHUNK = 24
_LOOPS = re.compile(r"\b(?:while|for)\b|\*\*|\bpow\b")
_MAX_TIMEOUTS = 3
_DRAWS = 96

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class ProbeRun:
    """A probe of a tool with what came of it."""

    tool: str
    probe: Probe
    execution: Execution

    @property
    def outcome(self) -> str:
        """A text that differs where value, error or changed state differ."""
        e = self.execution
        if e.status == "ok":
            return "ok " + fingerprint([e.value, e.state])
        return f"{e.status} {e.error_type} {e.message}"


class Evidence:
    """Executions for one environment whose graph is acyclic, names are unique and goldens complete. `skip` names the
    tools whose code must not run."""

    def __init__(self, env: Environment, sandbox: Sandbox, skip: Iterable[str] = ()) -> None:
        self.env = env
        self.sandbox = sandbox
        self.skip = set(skip)
        self.tools: dict[str, EnvTool] = {tool.name: tool for tool in (*env.tools, *env.distractors)}
        self.stateful = env.mode == "stateful"
        self.orders = topological_orders(env)
        self.golden_of: dict[str, Golden] = {golden.node: golden for golden in env.goldens}
        self._memo: dict[tuple[str, str, str], Execution] = {}
        self._timeouts: dict[str, int] = {}
        self._candidates: dict[str, Candidates] = {}
        self._probes: dict[str, list[ProbeRun]] = {}

    # Goldens

    @property
    def oracle(self) -> list[Golden]:
        """The goldens in the oracle's order."""
        return [self.golden_of[node] for node in self.orders[0]]

    @property
    def blocked(self) -> bool:
        """Whether some golden's tool may not run, so that nothing can be said of the whole."""
        return any(not self.runnable(golden.tool) for golden in self.oracle)

    @cached_property
    def replays(self) -> dict[str, Execution]:
        """node -> its golden's execution in a process of its own, each from the state that those before it left. Tools
        that may not run are left out."""
        out = {}
        state = self.env.state
        for golden in self.oracle:
            if golden.tool in self.skip:
                continue
            tool = self.tools[golden.tool]
            execution = self._fresh(tool, golden.arguments, state)
            if execution.status == "timeout" and execution.cpu_s < GOLDEN_CPU_S / 2:  # the machine was busy: once more
                execution = self._fresh(tool, golden.arguments, state)
            self._memo[self._key(tool.name, golden.arguments, state)] = execution
            out[golden.node] = execution
            state = execution.state if self.stateful else None
        return out

    def _fresh(self, tool: EnvTool, arguments: dict[str, Any], state: Any) -> Execution:
        return self.sandbox.run(
            tool.code, tool.name, whole_numbers(tool.parameters, arguments), data=self.env.data, state=state, cpu_s=GOLDEN_CPU_S
        )  # fmt: skip

    @cached_property
    def states(self) -> list[Any]:
        """State before each golden of the oracle, and at its end."""
        out = [self.env.state]
        for golden in self.oracle:
            execution = self.replays.get(golden.node)
            out.append(execution.state if execution is not None and self.stateful else out[-1])
        return out

    @cached_property
    def timed_out(self) -> set[str]:
        """Tools with a golden that ran out of time: not probed."""
        return {g.tool for g in self.oracle if g.node in self.replays and self.replays[g.node].status == "timeout"}

    def runnable(self, tool: str) -> bool:
        return tool not in self.skip and tool not in self.timed_out

    # Probes

    def candidates(self, tool: str) -> Candidates:
        if tool not in self._candidates:
            goldens = [golden for golden in self.oracle if golden.tool == tool]
            self._candidates[tool] = Candidates(self.env, self.tools[tool], goldens)
        return self._candidates[tool]

    def probes(self, tool: str) -> list[ProbeRun]:
        """The tool's probes, run. Empty for a tool that may not run."""
        if tool not in self._probes:
            self._probes[tool] = self._run_probes(tool) if self.runnable(tool) else []
        return self._probes[tool]

    def _run_probes(self, tool: str) -> list[ProbeRun]:
        candidates = self.candidates(tool)
        rng = rng_for(0, self.env.id, "probes", tool)
        bases: list[tuple[dict[str, Any], int | None]] = [
            (golden.arguments, place) for place, golden in enumerate(self.oracle) if golden.tool == tool
        ]
        if not bases:
            draws = [arguments for _ in range(_DRAWS) if (arguments := candidates.draw(rng)) is not None]
            tried = self._run(tool, unique(Probe(arguments) for arguments in draws))
            good = [run for run in tried if run.execution.status == "ok"] or tried
            bases = [(run.probe.arguments, None) for run in good[:3]]
        probes = [probe for base, golden in bases for probe in candidates.one_at_a_time(base, golden)]
        return self._run(tool, unique([*probes, *candidates.pairs(bases, rng)]))

    def _run(self, tool: str, probes: Sequence[Probe]) -> list[ProbeRun]:
        states = [self.states[p.golden] if p.golden is not None else self.env.state for p in probes]
        self.prefetch((tool, probe.arguments, state) for probe, state in zip(probes, states, strict=True))
        runs = []
        for probe, state in zip(probes, states, strict=True):
            execution = self._memo.get(self._key(tool, probe.arguments, state))
            if execution is not None:
                runs.append(ProbeRun(tool, probe, execution))
        return runs

    # Any call

    def _key(self, tool: str, arguments: dict[str, Any], state: Any) -> tuple[str, str, str]:
        return tool, fingerprint(arguments), fingerprint(state) if self.stateful else ""

    def prefetch(self, calls: Iterable[tuple[str, dict[str, Any], Any]]) -> None:
        """Run the calls (tool, arguments, state before) that are not known yet: one child per tool. A tool that keeps
        running out of time is given up."""
        wanted: dict[str, dict[tuple[str, str, str], tuple[dict[str, Any], Any]]] = {}
        for tool, arguments, state in calls:
            key = self._key(tool, arguments, state)
            if key not in self._memo and self.runnable(tool):
                wanted.setdefault(tool, {})[key] = (arguments, state)
        for tool, missing in wanted.items():
            keys, start = list(missing), 0
            # A tool with loops may hang on some probe: a few first, to see.
            size = _FIRST_CHUNK if _LOOPS.search(self.tools[tool].code) else len(keys)
            while start < len(keys) and self._timeouts.get(tool, 0) < _MAX_TIMEOUTS:
                part = keys[start : start + size]
                done = self._probe(tool, [missing[key] for key in part])
                self._memo.update(zip(part, done, strict=True))
                timeouts = sum(execution.status == "timeout" for execution in done)
                self._timeouts[tool] = self._timeouts.get(tool, 0) + timeouts
                # Half a second each is lost where a tool hangs: go on in small steps then, else all at once.
                start, size = start + len(part), len(keys) if not timeouts else 4

    def _probe(self, tool: str, calls: list[tuple[dict[str, Any], Any]]) -> list[Execution]:
        spec = self.tools[tool]
        return self.sandbox.run_many(
            spec.code,
            tool,
            [whole_numbers(spec.parameters, arguments) for arguments, _ in calls],
            data=self.env.data,
            states=[state for _, state in calls] if self.stateful else None,
            cpu_s=PROBE_CPU_S,
            wall_s=10 * PROBE_CPU_S,
        )

    def execution(self, tool: str, arguments: dict[str, Any], state: Any) -> Execution:
        """One call's execution, run now if it is not known."""
        key = self._key(tool, arguments, state)
        if key not in self._memo:
            self._memo[key] = self._fresh(self.tools[tool], arguments, state)
        return self._memo[key]

    def play(self, calls: Sequence[Call], final_text: str = "") -> Reward:
        """The F1 reward of an episode that makes these (valid) calls one after the other."""
        records, changed, state = self.episode(calls)
        return f1_of_calls(self.env, records, changed, state, final_text)

    def episode(self, calls: Sequence[Call]) -> tuple[list[CallRecord], list[bool], Any]:
        """(records, whether each changed the state, final state)."""
        records, changed = [], []
        state = self.env.state
        for i, (tool, arguments) in enumerate(calls):
            execution = self.execution(tool, arguments, state)
            ok = execution.status == "ok"
            wrote = ok and self.stateful and not equal(execution.state, state)
            if wrote:
                state = execution.state
            error = None if ok else call_error("tool", "tool_error", execution.message)
            records.append(
                CallRecord(id=f"call_{i}", turn=i, tool=tool, arguments=arguments, status="ok" if ok else "error", error=error, value=execution.value if ok else None)
            )  # fmt: skip
            changed.append(wrote)
        return records, changed, state

    def writes(self, golden: Golden) -> bool:
        """Whether a golden changes the state when the oracle plays it."""
        place = [g.node for g in self.oracle].index(golden.node)
        return self.stateful and not equal(self.states[place], self.states[place + 1])
