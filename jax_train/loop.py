"""The loop of a phase that trains on a fixed set of rows (SFT, DPO): steps, validation, checkpoints, the end.

A killed run continues from its last checkpoint with the same rows in the same order, so its losses are those of an
unbroken run; metrics that it had written after that checkpoint are taken back first.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astrolabe.progress import track
from astrolabe.records.run_store import RunStore
from jax_train.checkpoint import Checkpoints
from jax_train.config import TrainConfig
from jax_train.data import Rejection, StepStream
from jax_train.meters import Meter
from jax_train.packing import PackedBatch
from jax_train.trainer import Trainer

log = logging.getLogger(__name__)


class Validation:
    """Loss on held-out batches; the best weights so far lie in `folder`, as a Hugging Face folder."""

    def __init__(
        self,
        batches: Sequence[PackedBatch],
        folder: Path,
        *,
        every: int,
        patience: int | None = None,
        min_gain: float = 0.0,
    ) -> None:
        """patience: validations without a gain of `min_gain` after which training stops (None: never)."""
        self.batches, self.folder, self.every = list(batches), folder, every
        self.patience, self.min_gain = patience, min_gain
        self.best: float | None = None
        self.waited = 0
        """Validations since the best one."""

    @property
    def spent(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def measure(self, trainer: Trainer) -> float:
        """Validate the trainer's weights, and keep them if they are the best; those of a loss that is no number never are."""
        loss = trainer.evaluate(self.batches)
        if math.isfinite(loss) and (self.best is None or loss < self.best - self.min_gain):
            self.best, self.waited = loss, 0
            trainer.export(self.folder)
        else:
            self.waited += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class StepLoop:
    """From the last checkpoint to step `total`; `run` returns the phase's summary."""

    def __init__(
        self,
        phase: str,
        config: TrainConfig,
        trainer: Trainer,
        store: RunStore,
        stream: StepStream,
        *,
        total: int,
        fingerprint: str,
        rejected: Sequence[Rejection] = (),
        validation: Validation | None = None,
    ) -> None:
        self.phase, self.config, self.trainer, self.store = phase, config, trainer, store
        self.stream, self.total, self.rejected, self.validation = stream, total, list(rejected), validation
        self.checkpoints = Checkpoints(
            config.out / "checkpoints",
            trainer,
            fingerprint=fingerprint,
            keep=config.checkpoint.keep,
            data=stream.iterator,
        )
        self.step = 0
        self.last: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        try:
            self._resume()
            self._train()
        finally:
            self.checkpoints.close()
        return self._finish()

    @property
    def _over(self) -> bool:
        return self.step >= self.total or (self.validation is not None and self.validation.spent)

    def _train(self) -> None:
        meter = Meter(self.trainer.model)
        with track(self.phase.upper(), self.total, done=self.step) as bar:
            while not self._over:
                batch = next(self.stream)
                meter.start()
                self.last = self.trainer.update(batch)
                self.step += 1
                row = {"phase": self.phase, "step": self.step, **self.last, **meter.measure(batch)}
                validation = self.validation
                if validation is not None and (self.step % validation.every == 0 or self.step == self.total):
                    row["validation_loss"] = validation.measure(self.trainer)
                self.store.log_metrics(_finite(row))
                if self.step % self.config.checkpoint.every == 0 or self._over:
                    self._save()
                bar.advance(1, f"loss {self.last['loss']:.3f}")

    def _resume(self) -> None:
        found = self.checkpoints.restore()
        if found is not None:
            self.step, extra = found
            self.last = extra["last"]
            if self.validation is not None:
                self.validation.load_state_dict(extra["validation"])
            log.info("continuing after step %d", self.step)
        self.store.rewind(f"step-{self.step}" if found is not None else None)

    def _save(self) -> None:
        # The commit comes first: a checkpoint always finds its own step in the run.
        first = not self.store.entries
        self.store.commit(f"step-{self.step}", rows={}, rejected=self.rejected if first else [])
        validation = self.validation.state_dict() if self.validation is not None else None
        self.checkpoints.save(
            self.step, {"last": _finite(self.last), "validation": validation, "seed": self.config.seed}
        )

    def _finish(self) -> dict[str, Any]:
        model = self.config.out / "model"
        if self.validation is not None and self.validation.best is not None:
            shutil.copytree(self.validation.folder, model, dirs_exist_ok=True)
        else:
            self.trainer.export(model)
        self.store.finish()
        return {
            "phase": self.phase,
            "steps": self.step,
            "loss": self.last.get("loss"),
            "validation_loss": self.validation.best if self.validation is not None else None,
            "skipped": int(self.trainer.state.skipped),
            "rejected": len(self.rejected),
            "model": str(model),
        }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null for a number that is not finite, which JSON cannot say (a skipped step may have one)."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def steps_of(steps: int | None, epochs: float, rows: int, per_step: int) -> int:
    """Optimizer steps: as configured, or those that `epochs` passes over the rows take (at least one)."""
    return steps or max(1, math.ceil(epochs * rows / per_step))
