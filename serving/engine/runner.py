"""Batches for the device: which rows, ids and numbers go into each prefill and decode call.

Between the engine, which knows requests, and the jitted functions, which know arrays. It owns the weights and the cache.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import Params
from serving.engine.device import (
    SlotCache,
    cache_length,
    copy_prefix,
    decode_chunk,
    empty_cache,
    grow_cache,
    prefill,
)
from serving.engine.slots import Slot

CHUNK_SHAPES = ((8, 32), (4, 128))
"""Prefill calls: (rows, ids per row), shortest first."""
FIRST_LENGTH = 512
"""The cache starts with room for this many positions per slot and doubles when a request needs more."""
STOPS = 8


class Runner:
    """Weights and cache of one model on one device. All but `own` is for the engine's thread alone."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        slots: list[Slot],
        *,
        max_len: int,
        steps: int,
        dtype: Any,
        device: jax.Device,
    ) -> None:
        self.config = config
        self._slots, self._max_len, self._steps = slots, max_len, steps
        self._dtype, self._device = dtype, device
        self.params = self.own(params)
        self._cache: SlotCache = ()

    def start(self) -> None:
        """Make the cache. In the engine's thread: the one that made the engine may have set a mesh."""
        self._cache = empty_cache(self.config, len(self._slots), min(FIRST_LENGTH, self._max_len), self._dtype)

    @property
    def length(self) -> int:
        """Positions that each slot has room for now."""
        return cache_length(self._cache)

    def own(self, params: Params) -> Params:
        """Our copy on our device, whole: the trainer donates its own buffers at its next step.

        The sharding is named, not the device: given a device, JAX keeps a trainer's mesh axes in the array's type.
        """
        whole = jax.sharding.SingleDeviceSharding(self._device)
        return jax.tree.map(
            lambda x: jax.device_put(x if x.dtype == self._dtype else x.astype(self._dtype), whole, may_alias=False),
            params,
        )

    def copy(self, source: Slot, target: Slot) -> None:
        """What `source` holds, into `target`."""
        self._cache = copy_prefix(self._cache, np.int32(source.index), np.int32(target.index))

    def prefill(self, filling: list[Slot]) -> int:
        """One call for the rows with the most left, in the shortest chunk that fits them, else the longest; ids filled."""
        filling = sorted(filling, key=lambda s: s.valid - s.target)
        most = filling[0].target - filling[0].valid
        rows, width = next((shape for shape in CHUNK_SHAPES if most <= shape[1]), CHUNK_SHAPES[-1])
        rows = min(rows, len(self._slots))
        chosen = filling[:rows]
        table = np.zeros((rows, 3), np.int32)
        ids = np.zeros((rows, width), np.int32)
        taken = {slot.index for slot in chosen}
        idle = iter(index for index in range(len(self._slots)) if index not in taken)
        for row in range(rows):
            if row < len(chosen):
                slot = chosen[row]
                count = min(width, slot.target - slot.valid)
                table[row] = slot.index, slot.valid, count
                ids[row, :count] = slot.ids[slot.valid : slot.valid + count]
            else:
                table[row, 0] = next(idle)
        self._ensure_length(int((table[:, 1] + table[:, 2]).max()))
        self._cache = prefill(self.params, self._cache, table, ids, config=self.config)
        for row, slot in enumerate(chosen):
            slot.valid += int(table[row, 2])
        return int(table[:, 2].sum())

    def decode(self, ready: list[Slot]) -> list[tuple[Slot, list[int], list[float]]]:
        """One chunk for the ready slots (at least one): (slot, ids, log-probs) of each."""
        steps, slots = self._steps, len(self._slots)
        few = slots // 4
        rows = few if few >= 2 and len(ready) <= few else slots
        if rows == slots:
            members: list[Slot | None] = [slot if slot.ready else None for slot in self._slots]
            indices = list(range(slots))
        else:
            used = {slot.index for slot in ready}
            spare = [index for index in range(slots) if index not in used][: rows - len(ready)]
            members = [*ready, *([None] * len(spare))]
            indices = [*(slot.index for slot in ready), *spare]
        width = max(STOPS, _power_of_two(max(len(slot.request.stops) or 1 for slot in ready if slot.request)))
        ints = np.zeros((rows, 6), np.int32)
        floats = np.ones((rows, 2), np.float32)
        stops = np.full((rows, width), -1, np.int32)
        seeds = np.zeros(rows, np.uint64)
        ints[:, 0] = indices
        for row, slot in enumerate(members):
            request = slot.request if slot is not None else None
            if slot is None or request is None:
                continue
            left = request.max_new - len(request.output)
            ints[row] = slot.index, slot.ids[slot.target], slot.target, left, request.top_k, 1
            floats[row] = request.temperature, request.top_p
            stops[row, : len(request.stops)] = sorted(request.stops)
            seeds[row] = request.seed % 2**63
        self._ensure_length(max(slot.target + min(steps, int(ints[:, 3].max())) for slot in ready))
        truncated = any(slot.request and (slot.request.top_p < 1 or slot.request.top_k > 0) for slot in ready)
        self._cache, chunk = decode_chunk(
            self.params,
            self._cache,
            ints,
            floats,
            stops,
            uniform_numbers(seeds, ints[:, 2], steps),
            config=self.config,
            all_slots=rows == slots,
            truncated=truncated,
        )
        tokens, logprobs, counts = (np.asarray(part) for part in chunk)
        return [
            (slot, tokens[row, : counts[row]].tolist(), logprobs[row, : counts[row]].tolist())
            for row, slot in enumerate(members)
            if slot is not None
        ]

    def _ensure_length(self, needed: int) -> None:
        length = cache_length(self._cache)
        while length < min(needed, self._max_len):
            length = min(2 * length, self._max_len)
        if length > cache_length(self._cache):
            self._cache = grow_cache(self._cache, length=length)


def uniform_numbers(seeds: np.ndarray, positions: np.ndarray, steps: int) -> np.ndarray:
    """[B, steps] float32 in [0, 1): a hash (SplitMix64) of each row's seed [B] and the positions that follow [B]."""
    with np.errstate(over="ignore"):
        at = (positions.astype(np.uint64)[:, None] + np.arange(1, steps + 1, dtype=np.uint64)[None]) & np.uint64(
            2**32 - 1
        )
        value = _mix(_mix(seeds[:, None]) + at * np.uint64(0x9E3779B97F4A7C15))
    return ((value >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
