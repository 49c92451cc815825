"""The knobs of trajectory synthesis: how much is proposed and written per server, the gates' thresholds, the faults."""

from __future__ import annotations

from dataclasses import dataclass

from agents.context import Context


@dataclass(kw_only=True)
class TrajectoryContext(Context):
    """Runtime context of `graphs/trajectory.py`."""

    min_tools: int = 3
    """Good tools that a card needs; a connected server needs one."""
    proposals: int = 6
    """Chains asked for per server."""
    walks: int = 3
    """Walks sampled from a server's transition graph."""
    min_chain: int = 2
    max_chain: int = 5
    chains: int = 3
    """Chains per server for which a task is written, of those that pass."""
    votes: int = 3
    """Votes asked per chain; more than half of all must be yes."""
    server_tasks: int = 1
    """Tasks for the server alone, without a given chain; one more where no chain passed."""
    augment_share: float = 0.4
    """Share of originals that get one variation."""
    ask_share: float = 0.35
    abstain_share: float = 0.3
    chinese_share: float = 0.12
    """Share of Chinese tasks for cards that are not Chinese."""
    min_question_quality: int = 4
    """Ratings run from 1 (very_poor) to 5 (excellent)."""
    min_scenario_realism: int = 3
    min_tool_necessity: int = 4
    fault_rate: float = 0.2
    """Share of tool calls that meet an injected fault."""
    max_turns: int = 12
    max_calls: int = 16
    max_tokens: int = 8192
    min_score: float = 0.8
    """Mean of the applicable judgements that an accepted trajectory has at least."""
