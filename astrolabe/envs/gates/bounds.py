"""ceiling_violation, floor_violation, order_dependent: the reward pays the oracle in full, whatever order it works in, and
pays next to nothing for not solving the task."""

from __future__ import annotations

from dataclasses import dataclass

from astrolabe.envs.gates.evidence import Evidence
from astrolabe.envs.gates.graph import hops_and_width
from astrolabe.envs.gates.policies import greedy_episode, oracle_calls, random_episodes
from astrolabe.envs.gates.report import Finding
from astrolabe.envs.match import goal_holds
from astrolabe.records.environment import Floor

MAX_RANDOM = 0.34


@dataclass(frozen=True)
class Bounds:
    floor: Floor
    ceiling: float


def measure(evidence: Evidence) -> Bounds:
    """The rewards of the oracle and of the policies that solve nothing."""
    env = evidence.env
    noop = evidence.play([]).value
    echo = evidence.play([], final_text=env.question).value
    ceiling = evidence.play(oracle_calls(evidence, evidence.orders[0]), final_text=env.answer or "-").value
    episodes = list(random_episodes(evidence))
    if not evidence.stateful:
        evidence.prefetch((tool, arguments, None) for calls in episodes for tool, arguments in calls)
    else:
        _prefetch_stateful(evidence, episodes)
    chance = sum(evidence.play(calls).value for calls in episodes) / len(episodes)
    greedy = evidence.play(greedy_episode(evidence)).value
    return Bounds(Floor(noop=noop, echo=echo, random=chance, greedy=greedy), ceiling)


def _prefetch_stateful(evidence: Evidence, episodes: list[list[tuple[str, dict]]]) -> None:
    """All episodes one call at a time, so that one child per tool serves the same step of each."""
    states = [evidence.env.state] * len(episodes)
    for step in range(max(map(len, episodes), default=0)):
        live = [i for i, calls in enumerate(episodes) if step < len(calls)]
        evidence.prefetch((*episodes[i][step], states[i]) for i in live)
        for i in live:
            execution = evidence.execution(*episodes[i][step], states[i])
            if execution.status == "ok":
                states[i] = execution.state


def check_bounds(evidence: Evidence, bounds: Bounds, replayed: bool) -> list[Finding]:
    """`replayed`: whether every golden gave its value; where not, that is the finding, not what follows from it."""
    findings = []
    if replayed and bounds.ceiling != 1.0:
        reward = evidence.play(oracle_calls(evidence, evidence.orders[0]), final_text=evidence.env.answer or "-")
        findings.append(Finding("ceiling_violation", f"the oracle scores {bounds.ceiling:.3g} ({reward.reason})"))
    elif replayed:
        findings += _orders(evidence)
    return findings + (_floor(evidence, bounds.floor) if evidence.oracle else [])


def _orders(evidence: Evidence) -> list[Finding]:
    for order in evidence.orders[1:]:
        reward = evidence.play(oracle_calls(evidence, order), final_text=evidence.env.answer or "-")
        if reward.value != 1.0:
            return [
                Finding(
                    "order_dependent",
                    f"the oracle scores {reward.value:.3g} ({reward.reason}) in the order {', '.join(order)}",
                )
            ]
    return []


def _floor(evidence: Evidence, floor: Floor) -> list[Finding]:
    env = evidence.env
    found = [
        f"the {name} policy scores {value:.3g}, not 0"
        for name, value in (("no-op", floor.noop), ("echo", floor.echo))
        if value > 0
    ]
    if floor.random > MAX_RANDOM:
        found.append(f"random valid calls score {floor.random:.3g} on average, over {MAX_RANDOM}")
    if evidence.stateful:
        writes = any(evidence.writes(golden) for golden in evidence.oracle)
        at_start = goal_holds(env.goal, env.state)
        if at_start and writes:
            found.append("the goal holds before the first call, although a golden writes")
        if not at_start and not writes:
            found.append("the goal does not hold at the start, and no golden writes")
    elif hops_and_width(env)[0] >= 2 and floor.greedy >= 1:
        found.append("calling every tool once with arguments from the question scores 1")
    return [Finding("floor_violation", text) for text in found]
