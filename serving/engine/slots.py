"""The slot table: which request holds which cache row, and which prefix each row still has from before.

Host-side bookkeeping only. A row keeps its ids after its request ends, so that the next turn of the conversation
(whose prompt extends them) finds its cache in place, and other members of a group copy the prefix that they share. At a
change of weights nothing is reusable any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHARED_MIN = 16
"""A shared prefix shorter than this is not worth a copy."""


@dataclass(eq=False)
class Request:
    """One generation in flight. `ids` is the prompt, then what has been sampled."""

    ticket: int
    rid: str
    prompt: np.ndarray
    """int32 [n]."""
    max_new: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    finished: Any
    """Called once with the Request, or with an exception, from the engine's thread."""
    progress: Any = None
    """Called with the new ids after each chunk, from the engine's thread."""
    stops: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    cached: int = 0
    aborted: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def ids(self) -> np.ndarray:
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)]) if self.output else self.prompt


@dataclass(eq=False)
class Slot:
    index: int
    ids: np.ndarray
    """int32 [max_len]; the first `valid` are in the cache."""
    valid: int = 0
    request: Request | None = None
    target: int = 0
    """Ids that must be in the cache before the request decodes: all but its newest."""
    leader: Slot | None = None
    """The slot whose prefix is copied here as soon as it holds `shared` ids."""
    shared: int = 0
    used: int = 0
    """When it was last given out; the least recent is given out first."""
    mixed: bool = False
    """Holds keys of more than one weight version: of no use to another request."""

    @property
    def ready(self) -> bool:
        return self.request is not None and self.leader is None and self.valid >= self.target

    @property
    def filling(self) -> bool:
        return self.request is not None and self.leader is None and self.valid < self.target


class SlotTable:
    def __init__(self, slots: int, max_len: int) -> None:
        self.ids = np.zeros((slots, max_len), np.int32)
        self.slots = [Slot(index, self.ids[index]) for index in range(slots)]
        self._clock = 0

    @property
    def busy(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.request is not None]

    @property
    def any_free(self) -> bool:
        return any(slot.request is None for slot in self.slots)

    def admit(self, request: Request) -> Slot:
        """Give a free slot to `request`: the one that its ids extend, else the least recently used, with the longest
        prefix that any slot shares with it copied there (at once, or when its leader holds it)."""
        ids = request.ids()
        target = len(ids) - 1
        free = [slot for slot in self.slots if slot.request is None]
        held = np.array(
            [0 if slot.mixed else max(slot.valid, slot.target if slot.request else 0) for slot in self.slots]
        )
        differs = np.ones((len(self.slots), target + 1), bool)  # the last column: all were equal
        differs[:, :target] = self.ids[:, :target] != ids[None, :target]
        common = np.minimum(differs.argmax(axis=1), held)
        extended = [slot for slot in free if 0 < slot.valid == common[slot.index]]
        oldest = min(free, key=lambda slot: (slot.valid > 0, slot.used))
        best = self.slots[int(common.argmax())]
        shared = int(common[best.index])
        slot = max(extended, key=lambda slot: slot.valid) if extended else oldest
        if extended and slot.valid >= shared:
            shared, best = slot.valid, slot
        elif shared < SHARED_MIN:
            shared, best = 0, slot
        self._give(slot, request, ids, target)
        if best is slot:
            slot.valid = min(slot.valid, shared) if shared else 0
        else:
            slot.valid, slot.leader, slot.shared = 0, best, shared
        request.cached = shared
        return slot

    def _give(self, slot: Slot, request: Request, ids: np.ndarray, target: int) -> None:
        self._clock += 1
        slot.request, slot.target, slot.used = request, target, self._clock
        slot.leader, slot.shared, slot.mixed = None, 0, False
        slot.ids[: len(ids)] = ids

    def release(self, slot: Slot) -> None:
        """The request is over; what is in the cache stays for the next one."""
        slot.request, slot.leader, slot.target = None, None, 0
        if slot.mixed:
            slot.valid, slot.mixed = 0, False
        for other in self.slots:
            if other.leader is slot and slot.valid < other.shared:
                other.leader = None  # aborted before it held the prefix: the follower fills its own
                if other.request is not None:
                    other.request.cached = 0

    def drop_prefixes(self) -> None:
        """Nothing that is in the cache of a free slot may be used again."""
        for slot in self.slots:
            if slot.request is None:
                slot.valid = 0

    def recompute_all(self) -> None:
        """Nothing in the cache may be used again: running requests fill theirs anew."""
        self.drop_prefixes()
        for slot in self.busy:
            slot.valid, slot.leader, slot.mixed = 0, None, False
