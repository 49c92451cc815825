"""Preference pairs from a policy's own rollouts: same environment, same prompt, a clear gap in reward.

Within a group every better rollout may be set against a worse one. Pairs that part late are preferred (they say what
the deciding turn was), then those with the wider gap; a rollout is used once. Both sides are the ids that were sampled,
so they share their first `fork` tokens exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from astrolabe.records.errors import RunError
from astrolabe.records.jsonl import read_records
from astrolabe.records.messages import Message
from astrolabe.records.preference import Preference, PreferenceSide
from astrolabe.records.token_store import TokenStore
from astrolabe.records.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    min_gap: float = 0.1
    """Least difference of the rewards."""
    min_chosen: float = 0.0
    """The better side's reward must be above this: the less wrong of two wrong ones is no example."""
    max_per_group: int = 4


@dataclass(frozen=True)
class Candidate:
    """A scored rollout whose tokens are one unbroken row."""

    trajectory: Trajectory
    tokens: np.ndarray
    mask: np.ndarray

    @property
    def reward(self) -> float:
        assert self.trajectory.reward is not None
        return self.trajectory.reward.value


def read_candidates(run: Path) -> list[Candidate]:
    """The rollouts of a run that can be paired: scored, with one trace that holds a sampled token.

    A rollout whose history was rewritten has several traces and is left out. RunError if the run has no tokens or a trace
    is not within them, UsageError for a row that is no trajectory."""
    if not (run / "tokens").is_dir():
        raise RunError(f"{run}: no token store", "roll out with the policy's tokenizer (--model DIR)")
    store = TokenStore(run / "tokens", read_only=True)
    out = []
    for _, trajectory in read_records(run / "rollouts.jsonl", Trajectory, "give a run of rollouts"):
        if trajectory.reward is None or trajectory.group is None or len(trajectory.traces) != 1:
            continue
        arrays = store.read(trajectory.traces[0].start, trajectory.traces[0].length)
        if arrays.mask.any():
            out.append(Candidate(trajectory, arrays.tokens, arrays.mask))
    return out


def mine_pairs(candidates: Iterable[Candidate], config: PairConfig) -> list[Preference]:
    """Pairs of all groups, in the order of the groups' first rollouts."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(str(candidate.trajectory.group), []).append(candidate)
    return [pair for members in groups.values() for pair in _pairs_of(members, config)]


def _pairs_of(members: Sequence[Candidate], config: PairConfig) -> list[Preference]:
    ranked = []
    for i, better in enumerate(members):
        for j, worse in enumerate(members):
            gap = better.reward - worse.reward
            if gap < config.min_gap or gap <= 0 or better.reward <= config.min_chosen:
                continue
            fork = shared_prefix(better.tokens, worse.tokens)
            if not (better.mask[fork:].any() and worse.mask[fork:].any()):
                continue  # nothing that the policy did tells them apart
            ranked.append((-int(better.mask[:fork].sum()), -gap, i, j, fork))
    used: set[int] = set()
    pairs: list[Preference] = []
    for _, _, i, j, fork in sorted(ranked):
        if len(pairs) < config.max_per_group and not used & {i, j}:
            used |= {i, j}
            pairs.append(_preference(members[i], members[j], fork))
    return pairs


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading tokens that two rows have in common."""
    n = min(len(a), len(b))
    differ = np.nonzero(np.asarray(a[:n]) != np.asarray(b[:n]))[0]
    return int(differ[0]) if len(differ) else n


def _preference(chosen: Candidate, rejected: Candidate, fork: int) -> Preference:
    prompt, _ = _split(chosen.trajectory.messages)
    return Preference(
        schema="astrolabe.preference/1",
        group=chosen.trajectory.group,
        prompt=prompt,
        tools=chosen.trajectory.tools,
        chosen=_side(chosen),
        rejected=_side(rejected),
        fork=fork,
    ).with_id()


def _side(candidate: Candidate) -> PreferenceSide:
    _, messages = _split(candidate.trajectory.messages)
    trace = candidate.trajectory.traces[0].model_dump(mode="json")
    return PreferenceSide(messages=messages, trace=trace, reward=candidate.reward)


def _split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What stood before the policy spoke, and the rest."""
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])
