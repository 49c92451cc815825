"""Supervised fine-tuning on trajectories.

    trajectories -> rows by the template -> packed once -> shuffled rows -> steps -> validation -> out/model

The run folder holds `metrics.jsonl`, `rejected.jsonl` (trajectories without a row), checkpoints and the exported model:
the best by validation loss where there is a validation set, else the last.
"""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass
from typing import Any

from astrolabe.model.config import ModelConfig
from astrolabe.progress import track
from astrolabe.records.errors import UsageError
from astrolabe.records.run_store import RunStore
from jax_train.checkpoint import Checkpoints
from jax_train.config import SftConfig
from jax_train.data import (
    Rejection,
    Selection,
    StepStream,
    fingerprint,
    packed_rows,
    read_trajectories,
    sft_samples,
)
from jax_train.losses.sft import sft_loss
from jax_train.meters import Meter
from jax_train.packing import PackedBatch, Sample, pack
from jax_train.trainer import Trainer, identity, model_fingerprint
from serving.render import Renderer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftInputs:
    train: list[Sample]
    validation: list[Sample]
    rejected: list[Rejection]


def read_inputs(config: SftConfig) -> SftInputs:
    """Token rows of the configured files. UsageError where nothing is left to train on."""
    renderer = Renderer.from_folder(config.model.path, enable_thinking=config.data.enable_thinking)
    selection = Selection(
        budget=config.batch.budget, min_score=config.data.min_score, min_reward=config.data.min_reward
    )
    train, rejected = sft_samples(read_trajectories(config.data.train), renderer, selection)
    validation, also = sft_samples(read_trajectories(config.data.validation), renderer, selection)
    if not train:
        reasons = sorted({reason for row in rejected for reason in row["reasons"]})
        raise UsageError(
            f"no trajectory of data.train can be trained on ({', '.join(reasons) or 'there is none'})",
            "give other files, or raise batch.budget",
        )
    return SftInputs(train, validation, rejected + also)


def run(config: SftConfig) -> dict[str, Any]:
    """Train, or continue, the run of `config.out`; a summary with the final losses."""
    return train_on(config, read_inputs(config))


def train_on(config: SftConfig, inputs: SftInputs) -> dict[str, Any]:
    """The phase on token rows: `run` without reading trajectories."""
    vocab = ModelConfig.from_hf(config.model.path).vocab_size
    b = config.batch
    rows = packed_rows(inputs.train, b.budget, vocab)
    held_out = pack(inputs.validation, b.rows, b.budget, vocab_size=vocab)[0]
    stream = StepStream(rows, rows_per_batch=b.rows, micro_batches=b.micro_batches, seed=config.seed)
    total = config.steps or max(1, math.ceil(config.epochs * len(rows) / stream.per_step))
    prints = {
        "train": fingerprint(inputs.train),
        "validation": fingerprint(inputs.validation),
        "model": model_fingerprint(config.model.path),
    }
    with RunStore.open(config.out, verb="train sft", config=identity(config), seed=config.seed, inputs=prints) as store:
        trainer = Trainer.build(config, sft_loss, total)
        checkpoints = Checkpoints(
            config.out / "checkpoints",
            trainer,
            fingerprint=prints["train"],
            keep=config.checkpoint.keep,
            data=stream.iterator,
        )
        loop = _Loop(config, trainer, checkpoints, store, stream, held_out, total, inputs.rejected)
        try:
            return loop.run()
        finally:
            checkpoints.close()


class _Loop:
    """Steps from the last checkpoint to the end."""

    def __init__(
        self,
        config: SftConfig,
        trainer: Trainer,
        checkpoints: Checkpoints,
        store: RunStore,
        stream: StepStream,
        held_out: list[PackedBatch],
        total: int,
        rejected: list[Rejection],
    ) -> None:
        self.config, self.trainer, self.checkpoints, self.store = config, trainer, checkpoints, store
        self.stream, self.held_out, self.total, self.rejected = stream, held_out, total, rejected
        self.step = 0
        self.last_loss = math.nan
        self.best: float | None = None
        self.waited = 0
        """Validations since the best one."""

    def run(self) -> dict[str, Any]:
        self._resume()
        meter = Meter(self.trainer.model)
        with track("SFT", self.total, done=self.step) as bar:
            while self.step < self.total and not self._patience_spent():
                batch = next(self.stream)
                meter.start()
                report = self.trainer.update(batch)
                self.step += 1
                self.last_loss = report["loss"]
                row = {"phase": "sft", "step": self.step, **report, **meter.measure(batch)}
                if self.held_out and (self.step % self.config.eval_every == 0 or self.step == self.total):
                    row["validation_loss"] = self._validate()
                self.store.log_metrics(row)
                if self.step % self.config.checkpoint.every == 0 or self.step == self.total or self._patience_spent():
                    self._save()
                bar.advance(1, f"loss {self.last_loss:.3f}")
        return self._finish()

    def _resume(self) -> None:
        found = self.checkpoints.restore()
        if found is not None:
            self.step, extra = found
            self.last_loss, self.best, self.waited = extra["last_loss"], extra["best"], extra["waited"]
            log.info("continuing after step %d", self.step)
        # Metrics that a killed run wrote after its last checkpoint come again.
        self.store.rewind(f"step-{self.step}" if found is not None else None)

    def _validate(self) -> float:
        loss = self.trainer.evaluate(self.held_out)
        if self.best is None or loss < self.best - self.config.min_gain:
            self.best, self.waited = loss, 0
            self.trainer.export(self.config.out / "best")
        else:
            self.waited += 1
        return loss

    def _patience_spent(self) -> bool:
        return self.config.patience is not None and self.waited >= self.config.patience

    def _save(self) -> None:
        # The commit comes first: a checkpoint always finds its own step in the run.
        first = not self.store.entries
        self.store.commit(f"step-{self.step}", rows={}, rejected=self.rejected if first else [])
        self.checkpoints.save(
            self.step, {"last_loss": self.last_loss, "best": self.best, "waited": self.waited, "seed": self.config.seed}
        )

    def _finish(self) -> dict[str, Any]:
        model = self.config.out / "model"
        if self.best is not None:
            shutil.copytree(self.config.out / "best", model, dirs_exist_ok=True)
        else:
            self.trainer.export(model)
        self.store.finish()
        return {
            "phase": "sft",
            "steps": self.step,
            "loss": self.last_loss,
            "validation_loss": self.best,
            "skipped": int(self.trainer.state.skipped),
            "rejected": len(self.rejected),
            "model": str(model),
        }
