"""Seeded faults: which calls of an episode meet a server that is slow, down, busy or broken, decided before any runs.

A fault is drawn from (seed, episode, call index), so neither the order of episodes nor what other calls did changes it.
Injected faults are recorded as such and count in nobody's score.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from astrolabe.records.errors import UsageError
from astrolabe.records.ids import rng_for
from astrolabe.records.trajectory import CallError, ErrorClass, ErrorKind

FaultKind = Literal["timeout", "unreachable", "rate_limit", "server_error", "malformed"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

_MESSAGES: dict[FaultKind, str] = {
    "timeout": "the tool did not answer in time",
    "unreachable": "the tool's server cannot be reached",
    "rate_limit": "too many requests; try again later",
    "server_error": "the tool's server failed (status 500)",
    "malformed": "the tool's server sent a reply that is not JSON",
}


def call_error(error_class: ErrorClass, kind: ErrorKind, message: str) -> CallError:
    """A record's error (`class` is a keyword of Python, hence this)."""
    return CallError.from_json({"class": error_class, "kind": kind, "message": message})


def fault_error(kind: FaultKind) -> CallError:
    """The error that a fault of this kind leaves in the record."""
    error_class: ErrorClass = "timeout" if kind == "timeout" else "infra"
    return call_error(error_class, kind, _MESSAGES[kind])


@dataclass(frozen=True)
class FaultPlan:
    """Faults at a rate in [0, 1], of the named kinds in equal shares."""

    rate: float = 0.0
    seed: int = 0
    kinds: tuple[FaultKind, ...] = field(default=FAULT_KINDS)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds) - set(FAULT_KINDS))
        if not 0 <= self.rate <= 1 or unknown or not self.kinds:
            raise UsageError(
                f"bad fault plan: rate {self.rate}, kinds {', '.join(self.kinds) or 'none'}",
                f"a rate from 0 to 1 and kinds among {', '.join(FAULT_KINDS)}",
            )

    def draw(self, episode: str, call_index: int) -> FaultKind | None:
        """The fault of this episode's call number `call_index` (from 0), or None."""
        if self.rate == 0:
            return None
        rng = rng_for(self.seed, "fault", episode, call_index)
        hit = rng.random() < self.rate
        kind = rng.choice(self.kinds)
        return kind if hit else None
