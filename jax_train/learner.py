"""The trainer's side of a phase that learns from samples of its own: pack, run, one update.

Shapes are few: rows and budget are fixed, and the number of micro-batches is rounded up to a power of two, so that a
run compiles a handful of programs however its batches vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from astrolabe.records.errors import UsageError
from jax_train.mesh import use_mesh
from jax_train.meters import Meter
from jax_train.packing import Sample, max_segments, pack, stack
from jax_train.trainer import Trainer


class PackedLearner:
    """A trainer over samples, packed to batches of `[rows, budget]`."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        rows: int,
        budget: int,
        micro_batches: int = 1,
        segments: int = 64,
        keep_reference: bool = False,
    ) -> None:
        """micro_batches: the least that a step is padded to. segments: the most samples in a row, as the loss was made
        for. keep_reference: keep the present weights, whose log-probs every update then gets."""
        self.trainer = trainer
        self._rows, self._budget, self._micro, self._segments = rows, budget, micro_batches, segments
        self._meter = Meter(trainer.model)
        self._reference = jax.tree.map(jnp.copy, trainer.state.params) if keep_reference else None

    @property
    def params(self) -> Any:
        return self.trainer.state.params

    def logprobs(self, samples: Sequence[Sample], params: Any = None) -> list[np.ndarray]:
        """Log-probs of the trained tokens of each sample [n] float32 under `params` (the present ones); 0 elsewhere."""
        trainer, weights = self.trainer, self.params if params is None else params
        batches, places = pack(samples, self._rows, self._budget, vocab_size=trainer.model.vocab_size)
        with use_mesh(trainer.mesh):
            found = [np.asarray(trainer.logprob_pass(weights, trainer.put(batch))) for batch in batches]
        return [found[place.batch][place.row, place.start : place.end] for place in places]

    def update(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One optimizer step over all samples; its metrics, and its speed. UsageError where a row holds more samples
        than the loss was made for."""
        if self._reference is not None:
            references = self.logprobs(samples, self._reference)
            samples = [replace(s, ref_logprobs=lp) for s, lp in zip(samples, references, strict=True)]
        batches, _ = pack(samples, self._rows, self._budget, vocab_size=self.trainer.model.vocab_size)
        most = max(map(max_segments, batches))
        if most > self._segments:
            raise UsageError(
                f"a row of {self._budget} tokens holds {most} samples, {self._segments} are allowed",
                "lower batch.budget: the samples are short",
            )
        micro = stack(batches, max(self._micro, 1 << (len(batches) - 1).bit_length()))
        self._meter.start()
        report = self.trainer.update(micro)
        return {**report, **self._meter.measure(micro)}
