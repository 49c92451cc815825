"""Who is sampled when: one asyncio loop that dispatches groups ahead and fills batches through the filler.

Environments come in seeded epochs; position k of that endless order names one group for ever, with its environment and
its seed, so a resumed run samples what the unbroken one would have. Groups are dispatched by the observed acceptance
rate, each under a deadline. Synchronously, they land in the order of dispatch and all before the weights change, so a
run repeats exactly; else they land as they come, a straggler holds nobody up, and groups may span a change of weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from astrolabe.records.environment import Environment
from astrolabe.records.errors import AstrolabeError
from astrolabe.records.ids import rng_for, seed_for
from jax_train.filler import Filler
from jax_train.groups import Group, group_id

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slot:
    """One position of the order: which environment, and the seed of its group."""

    position: int
    environment: Environment
    seed: int

    @property
    def id(self) -> str:
        return group_id(self.environment, self.seed)


Roll = Callable[[Slot], Awaitable[Group]]


class Scheduler:
    def __init__(
        self,
        environments: Sequence[Environment],
        filler: Filler[Group],
        roll: Roll,
        *,
        seed: int,
        max_in_flight: int = 8,
        deadline_s: float = 1200.0,
        synchronous: bool = True,
        landed: Callable[[Slot, Group | None, str | None], None] | None = None,
    ) -> None:
        """`roll` samples one slot. `synchronous`: groups land in the order of dispatch, and a batch is handed out when
        none is in flight, so that all that is sampled is sampled by known weights. `landed` hears of every group that came back: the slot, the group (None if it was
        given up) and why it was dropped (None if it was kept)."""
        if not environments:
            raise ValueError("no environments")
        self._environments, self._filler, self._roll = list(environments), filler, roll
        self._seed, self._max_in_flight, self._deadline_s = seed, max_in_flight, deadline_s
        self._synchronous, self._landed = synchronous, landed
        self.position = 0
        """The next position to dispatch."""
        self._flying: dict[int, tuple[Slot, asyncio.Task[Group]]] = {}

    def slot(self, position: int) -> Slot:
        epoch, index = divmod(position, len(self._environments))
        order = list(range(len(self._environments)))
        rng_for(self._seed, "epoch", epoch).shuffle(order)
        return Slot(position, self._environments[order[index]], seed_for(self._seed, "group", position))

    async def fill(self, version: int) -> list[Group]:
        """A full batch for a step of the weights at `version`. FillingFailed when it cannot be filled."""
        while True:
            if not (self._synchronous and self._flying and self._filler.ready):
                batch = self._filler.take(version)
                if batch is not None:
                    return batch
                self.dispatch(self._filler.wanted())
            await self._land()

    def dispatch(self, count: int) -> None:
        """Start up to `count` groups, within the bound of groups in flight."""
        for _ in range(min(count, self._max_in_flight - len(self._flying))):
            slot = self.slot(self.position)
            self.position += 1
            self._filler.dispatch(slot.id)
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        self._flying[slot.position] = (slot, asyncio.create_task(self._under_deadline(slot)))

    async def _under_deadline(self, slot: Slot) -> Group:
        async with asyncio.timeout(self._deadline_s):
            return await self._roll(slot)

    async def _land(self) -> None:
        """Wait for a group (the oldest, or the first to come) and offer it."""
        if not self._flying:
            return
        if self._synchronous:
            position = min(self._flying)
            await asyncio.wait([self._flying[position][1]])
        else:
            tasks = {task: position for position, (_, task) in self._flying.items()}
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            position = min(tasks[task] for task in done)
        slot, task = self._flying.pop(position)
        group, reason = None, None
        error = task.exception()
        if error is None:
            group = task.result()
            reason = self._filler.offer(group)
        elif isinstance(error, AstrolabeError):  # a wrong setting or a dead server: every group would meet it
            raise error
        else:
            reason = "deadline" if isinstance(error, TimeoutError) else "internal"
            if reason == "internal":
                log.error("group %s", slot.id, exc_info=error)
            self._filler.give_up(slot.id, reason)
        if self._landed is not None:
            self._landed(slot, group, reason)

    async def stop(self) -> None:
        """Cancel what is in flight. It stays in flight for the filler's books: `state_dict` names it, to be resumed."""
        for _, task in self._flying.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._flying.values()), return_exceptions=True)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "in_flight": sorted(self._flying)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue: what was in flight is started again from its own seed (call it inside the loop, after the
        filler's). ValueError if the filler's books name other groups."""
        slots = [self.slot(position) for position in state["in_flight"]]
        if sorted(slot.id for slot in slots) != sorted(self._filler.in_flight):
            raise ValueError("the groups in flight are not those that the filler has dispatched")
        self.position = state["position"]
        for slot in slots:
            self._start(slot)
