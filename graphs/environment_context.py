"""The knobs of environment synthesis: kinds and hops, attempts, distractors; and what runs and gates the code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from agents.context import Context
from astrolabe.envs.sandbox import Sandbox
from graphs.env_gates import GatePool


@dataclass(kw_only=True)
class EnvironmentContext(Context):
    """Runtime context of `graphs/environment.py`."""

    min_hops: int = 1
    max_hops: int = 5
    no_tool_share: float = 0.08
    missing_parameter_share: float = 0.08
    """Shares of samples that no call can answer: the policy has to abstain, or to ask."""
    stateful_share: float = 0.1
    tool_attempts: int = 3
    """How often a tool that fails its gates is written again, the failing case fed back."""
    max_distractors: int = 4
    """One to this many, drawn over the three bands."""
    gate_workers: int = 2
    """Processes that gate finished rows, and sandbox workers for tools under way."""
    sandbox_level: str = "auto"
    other_texts: Mapping[str, list[str]] = field(default_factory=dict)
    """language -> knowledge texts that lend distractors from other domains."""
    source: str = "knowledge"
    license: str = "LicenseRef-input"
    """Licence of the knowledge, for the provenance of each environment."""

    @cached_property
    def sandbox(self) -> Sandbox:
        """Runs tools while they are written. UsageError below the configured level."""
        return Sandbox(level=self.sandbox_level, workers=self.gate_workers)

    @cached_property
    def gates(self) -> GatePool:
        """Processes that reopen a serialised row and gate it."""
        return GatePool(self.gate_workers)

    def close(self) -> None:
        """Ends the processes that were started."""
        for name in ("sandbox", "gates"):
            if name in self.__dict__:
                self.__dict__[name].close()
