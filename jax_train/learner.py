"""The trainer's side of a phase that learns from samples: pack, run, one update.

Shapes are few: rows and budget are fixed, and the number of micro-batches is rounded up to a power of two, so that a
run compiles a handful of programs however its batches vary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_train.mesh import put_batch, use_mesh
from jax_train.packing import PackedBatch, Sample, pack, pad_fraction, stack
from jax_train.step import Step, TrainState


class PackedLearner:
    """State, step and log-prob pass over batches of `[rows, budget]`."""

    def __init__(
        self,
        state: TrainState,
        step: Step,
        logprob_pass: Callable[[Any, PackedBatch], jax.Array],
        *,
        rows: int,
        budget: int,
        vocab_size: int,
        mesh: Mesh | None = None,
    ) -> None:
        self.state = state
        self._step, self._logprob_pass = step, logprob_pass
        self._rows, self._budget, self._vocab_size, self._mesh = rows, budget, vocab_size, mesh

    @property
    def params(self) -> Any:
        return self.state.params

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The present weights' log-probs of the trained tokens of each sample [n] float32; 0 where mask is 0."""
        batches, places = pack(samples, self._rows, self._budget, vocab_size=self._vocab_size)
        with use_mesh(self._mesh):
            found = [np.asarray(self._logprob_pass(self.state.params, put_batch(b, self._mesh))) for b in batches]
        return [found[place.batch][place.row, place.start : place.end] for place in places]

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step over all samples; its metrics and the share of padding."""
        batches, _ = pack(samples, self._rows, self._budget, vocab_size=self._vocab_size)
        micro = stack(batches, 1 << (len(batches) - 1).bit_length())
        with use_mesh(self._mesh):
            self.state, report = self._step(self.state, put_batch(micro, self._mesh))
        padding = float(np.mean([pad_fraction(batch) for batch in batches]))
        return {**{name: float(value) for name, value in report.items()}, "padding": padding}
