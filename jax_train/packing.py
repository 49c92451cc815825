"""Samples into rows: the one layout `[rows, budget]` of SFT, GRPO and DPO.

Samples stand one behind another in a row, each its own segment (1, 2, ...; 0 is padding) with positions from 0, and
attention never crosses segments. `mask[t] = 1` says that token t is trained as a target: it was sampled by the policy
(or, in SFT, is the demonstrator's). Rows are filled by first-fit decreasing. Nothing is ever cut: a sample that does
not fit is an error that names the number to change. The mask goes by length, never by a token's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from astrolabe.records.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One token sequence. Arrays have its length n; `advantage` may be one number for all tokens."""

    tokens: Sequence[int] | np.ndarray
    mask: Sequence[int] | np.ndarray
    logprobs: np.ndarray | None = None
    """The engine's log-probs of the tokens (anything, even NaN, where mask is 0)."""
    advantage: float | np.ndarray | None = None
    prox_logprobs: np.ndarray | None = None
    """The trainer's own log-probs at the start of the update, where they were computed."""
    ref_logprobs: np.ndarray | None = None
    item: str = ""
    """Where it comes from, for messages and the ledger of consumed items."""

    def __len__(self) -> int:
        return len(self.tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedBatch:
    """Rows of packed samples; every array is [rows, budget], or [micro, rows, budget] once stacked."""

    tokens: Any  # int32
    mask: Any  # float32, 1 where the token is a trained target
    positions: Any  # int32, from 0 in each segment
    segment_ids: Any  # int32, 0 = padding
    logprobs: Any  # float32, the engine's; 0 where mask is 0
    advantages: Any  # float32; 0 where mask is 0
    prox_logprobs: Any  # float32, the trainer's; 0 where mask is 0
    ref_logprobs: Any  # float32, the reference's; 0 where mask is 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tokens.shape


@dataclass(frozen=True)
class Place:
    """Where a sample went: batch, row, and its range of columns."""

    batch: int
    row: int
    start: int
    end: int


_DTYPES = {"tokens": np.int32, "positions": np.int32, "segment_ids": np.int32}
_TARGET_ARRAYS = ("logprobs", "prox_logprobs", "ref_logprobs")


def empty_batch(rows: int, budget: int) -> PackedBatch:
    """All padding."""
    return PackedBatch(
        **{f.name: np.zeros((rows, budget), _DTYPES.get(f.name, np.float32)) for f in fields(PackedBatch)}
    )


def check_sample(sample: Sample, vocab_size: int) -> None:
    """Raise ValueError unless ids are in range, the mask is 0 or 1 and of the same length, and token 0 is no target."""
    tokens, mask = np.asarray(sample.tokens), np.asarray(sample.mask)
    where = f"sample {sample.item!r}" if sample.item else "sample"
    if tokens.ndim != 1 or tokens.shape != mask.shape:
        raise ValueError(f"{where}: {tokens.shape} tokens and {mask.shape} mask")
    if tokens.size == 0:
        raise ValueError(f"{where}: no tokens")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"{where}: ids in [{tokens.min()}, {tokens.max()}], the vocabulary has {vocab_size}")
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"{where}: the mask holds other values than 0 and 1")
    if mask[0]:
        raise ValueError(f"{where}: token 0 is marked as trained, but nothing comes before it to predict it from")
    for name in _TARGET_ARRAYS:
        array = getattr(sample, name)
        if array is not None and np.shape(array) != tokens.shape:
            raise ValueError(f"{where}: {tokens.shape} tokens and {np.shape(array)} {name}")
        if array is not None and not np.isfinite(np.asarray(array)[mask == 1]).all():
            raise ValueError(f"{where}: {name} of a trained token is missing or not finite")


def fill_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: rows of indices whose lengths sum to at most `budget`; ties keep their order."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[index]
        if size > budget:
            raise UsageError(
                f"a sample of {size} tokens does not fit a row of {budget}",
                f"set batch.budget to at least {size}, or leave the sample out",
            )
        row = next((r for r, left in enumerate(room) if left >= size), None)
        if row is None:
            rows.append([])
            room.append(budget)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= size
    return rows


def pack(
    samples: Sequence[Sample], rows: int, budget: int, *, vocab_size: int, together: int = 1
) -> tuple[list[PackedBatch], list[Place]]:
    """Samples packed to batches of `[rows, budget]`, and where each sample went (in the order of `samples`).

    `together`: that many consecutive samples stay side by side in one row (2 for preference pairs: pair k of a row is
    its segments 2k+1 and 2k+2). Raises UsageError for a sample that does not fit, ValueError for a wrong one.
    """
    for sample in samples:
        check_sample(sample, vocab_size)
    units = [samples[i : i + together] for i in range(0, len(samples), together)]
    filled = fill_rows([sum(map(len, unit)) for unit in units], budget)
    batches: list[PackedBatch] = []
    places: list[Place | None] = [None] * len(samples)
    for number, members in enumerate(filled):
        index, row = divmod(number, rows)
        if row == 0:
            batches.append(empty_batch(rows, budget))
        start = 0
        for segment, i in enumerate((u * together + j for u in members for j in range(together)), 1):
            end = start + len(samples[i])
            _write(batches[index], samples[i], row, start, end, segment)
            places[i] = Place(index, row, start, end)
            start = end
    return batches, [place for place in places if place is not None]


def _write(batch: PackedBatch, sample: Sample, row: int, start: int, end: int, segment: int) -> None:
    span = (row, slice(start, end))
    mask = np.asarray(sample.mask, np.float32)
    batch.tokens[span] = sample.tokens
    batch.mask[span] = mask
    batch.positions[span] = np.arange(end - start)
    batch.segment_ids[span] = segment
    for name in _TARGET_ARRAYS:
        array = getattr(sample, name)
        if array is not None:
            getattr(batch, name)[span] = np.where(mask == 1, array, 0)
    if sample.advantage is not None:
        batch.advantages[span] = np.where(mask == 1, sample.advantage, 0)


def stack(batches: Sequence[PackedBatch], micro: int | None = None) -> PackedBatch:
    """Batches as micro-batches of one step, [micro, rows, budget]; filled with empty ones up to `micro`.

    The step skips empty micro-batches, so a fixed `micro` costs little and saves compilations.
    """
    if micro is not None and len(batches) > micro:
        raise UsageError(
            f"{len(batches)} micro-batches, {micro} are allowed in a step", "raise batch.micro_batches or batch.rows"
        )
    rows, budget = batches[0].shape
    batches = [*batches, *[empty_batch(rows, budget)] * ((micro or len(batches)) - len(batches))]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *batches)


def max_segments(batch: PackedBatch) -> int:
    """The most segments in one row."""
    return int(np.max(batch.segment_ids)) if np.size(batch.segment_ids) else 0


def pad_fraction(batch: PackedBatch) -> float:
    """Share of the places that hold padding."""
    return float(np.mean(np.asarray(batch.segment_ids) == 0))
