"""Adaptive batch filling (ASTRA): only groups whose trained reward varies enter a batch, and the batch is full.

A pure state machine; who samples, and when, is the scheduler's business. A group is dispatched, then offered with what
came of its rollouts (or given up). It is kept if, among the rollouts that could be scored, max - min of the key is
above the threshold: within a group of equal rewards every advantage is 0. Kept groups wait in a buffer; `take` hands
out exactly `target` of them, the oldest first, and what is left stays for the next batch unless it has grown staler
than allowed. A batch that is not full within its budget of dispatched groups is an error that says what was dropped.

The ledger balances at every moment: dispatched = in flight + buffered + trained + dropped by reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from astrolabe.records.errors import RunError

Key = Literal["reward", "accuracy"]


class FillerGroup(Protocol):
    """What the filler needs to know of a group."""

    @property
    def id(self) -> str: ...
    @property
    def oldest_version(self) -> int:
        """The oldest weight version that sampled one of its tokens."""
        ...

    def values(self, key: Key) -> Sequence[float]:
        """One number per rollout that could be scored; failed ones are left out, never 0."""
        ...

    def to_json(self) -> dict[str, Any]: ...


G = TypeVar("G", bound=FillerGroup)


class FillingFailed(RunError):
    """The budget of a batch is spent and the batch is not full."""


@dataclass
class Ledger:
    """Groups, counted once each."""

    dispatched: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


@dataclass(frozen=True, kw_only=True)
class FillerConfig:
    target: int
    """Groups in a batch."""
    key: Key = "reward"
    """What must vary: the trained reward, or whether the answer was right."""
    threshold: float = 1e-6
    max_staleness: int = 1
    """Weight versions by which the oldest token of a trained group may lag behind the weights that train on it."""
    budget: float = 10.0
    """A batch may cost this many times `target` dispatched groups."""


class Filler(Generic[G]):
    def __init__(self, config: FillerConfig) -> None:
        if config.target < 1 or config.budget < 1 or config.threshold < 0 or config.max_staleness < 0:
            raise ValueError(f"out of range: {config}")
        self.config = config
        self.ledger = Ledger()
        self.buffer: list[G] = []
        self.in_flight: list[str] = []
        """Ids in the order of dispatch."""
        self._spent = 0
        """Groups dispatched since the last batch was taken."""
        self._dropped_before: dict[str, int] = {}
        self._kept = self._judged = 0

    # -- before sampling ----------------------------------------------------------------------------------------------

    @property
    def missing(self) -> int:
        """Groups that the next batch still lacks."""
        return max(0, self.config.target - len(self.buffer))

    @property
    def ready(self) -> bool:
        return self.missing == 0

    @property
    def accept_rate(self) -> float:
        """Share of the judged groups that were kept, from one imagined group kept of two: never 0 or 1."""
        return (self._kept + 1) / (self._judged + 2)

    def wanted(self) -> int:
        """How many groups to dispatch now, so that the batch is full at the observed acceptance rate; within the
        budget. 0 when those in flight should do, or when the batch is full."""
        if self.ready:
            return 0
        expected = math.ceil(self.missing / self.accept_rate) - len(self.in_flight)
        return max(0, min(expected, self._allowance()))

    def _allowance(self) -> int:
        return max(0, int(self.config.budget * self.config.target) - self._spent)

    def dispatch(self, group_id: str) -> None:
        """A group is being sampled. ValueError if it is in flight or buffered already."""
        if group_id in self.in_flight or any(group.id == group_id for group in self.buffer):
            raise ValueError(f"group {group_id} is dispatched already")
        self.in_flight.append(group_id)
        self.ledger.dispatched += 1
        self._spent += 1

    # -- after sampling -----------------------------------------------------------------------------------------------

    def offer(self, group: G) -> str | None:
        """A dispatched group came back. None if it was kept, else why it was dropped:
        `failed` (no rollout could be scored), `singleton` (one could: it has no baseline) or `flat`."""
        values = group.values(self.config.key)
        if not all(map(math.isfinite, values)):
            raise ValueError(f"group {group.id}: a reward is not finite: {list(values)}")
        self._landed(group.id)
        reason = None
        if len(values) < 2:
            reason = "singleton" if values else "failed"
        elif max(values) - min(values) <= self.config.threshold:
            reason = "flat"
        if reason != "failed":  # a dead server says nothing of the environments
            self._judged += 1
            self._kept += reason is None
        if reason is None:
            self.buffer.append(group)
        else:
            self.ledger.drop(reason)
        return reason

    def give_up(self, group_id: str, reason: str) -> None:
        """A dispatched group will not come back."""
        self._landed(group_id)
        self.ledger.drop(reason)

    def _landed(self, group_id: str) -> None:
        if group_id not in self.in_flight:
            raise ValueError(f"group {group_id} was not dispatched")
        self.in_flight.remove(group_id)

    # -- training -----------------------------------------------------------------------------------------------------

    def expire(self, version: int) -> list[str]:
        """Drop what is too stale to be trained on by weights of `version`; the ids of what was dropped."""
        stale = [g for g in self.buffer if version - g.oldest_version > self.config.max_staleness]
        self.buffer = [g for g in self.buffer if g not in stale]
        for _ in stale:
            self.ledger.drop("stale")
        return [group.id for group in stale]

    def take(self, version: int) -> list[G] | None:
        """Exactly `target` groups for a step of the weights at `version`; None while there are not enough.

        FillingFailed when they cannot come: nothing is in flight and the budget is spent."""
        self.expire(version)
        if not self.ready:
            if not self.in_flight and self._allowance() == 0:
                raise FillingFailed(self._complaint(), "see the drop counts: " + _MEND)
            return None
        batch, self.buffer = self.buffer[: self.config.target], self.buffer[self.config.target :]
        self.ledger.trained += len(batch)
        self._spent = 0
        self._dropped_before = dict(self.ledger.dropped)
        return batch

    def _complaint(self) -> str:
        now = {k: n - self._dropped_before.get(k, 0) for k, n in sorted(self.ledger.dropped.items())}
        counts = ", ".join(f"{reason} {n}" for reason, n in now.items() if n) or "none"
        return f"no full batch after {self._spent} groups: {len(self.buffer)} of {self.config.target} kept; dropped: {counts}"

    # -- state --------------------------------------------------------------------------------------------------------

    def balance(self) -> int:
        """0 as long as every group is accounted for once."""
        ledger = self.ledger
        accounted = ledger.trained + sum(ledger.dropped.values()) + len(self.buffer) + len(self.in_flight)
        return ledger.dispatched - accounted

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON. Groups in flight are named, so that who resumes can dispatch them again (see `load_state_dict`)."""
        return {
            "dispatched": self.ledger.dispatched,
            "trained": self.ledger.trained,
            "dropped": dict(self.ledger.dropped),
            "dropped_before": dict(self._dropped_before),
            "buffer": [group.to_json() for group in self.buffer],
            "in_flight": list(self.in_flight),
            "spent": self._spent,
            "kept": self._kept,
            "judged": self._judged,
        }

    def load_state_dict(self, state: dict[str, Any], group_from_json: Callable[[dict[str, Any]], G]) -> list[str]:
        """Continue from `state_dict`. Returns the ids that were in flight: they are in flight still, counted as
        dispatched, and the caller samples them again."""
        self.ledger = Ledger(state["dispatched"], state["trained"], dict(state["dropped"]))
        self._dropped_before = dict(state["dropped_before"])
        self.buffer = [group_from_json(row) for row in state["buffer"]]
        self.in_flight = list(state["in_flight"])
        self._spent, self._kept, self._judged = state["spent"], state["kept"], state["judged"]
        return list(self.in_flight)


_MEND = (
    "`flat` asks for environments nearer to the policy's skill or for larger groups, "
    "`failed` for a look at the servers, `stale` for a higher max_staleness"
)
