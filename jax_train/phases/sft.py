"""Supervised fine-tuning on trajectories.

    trajectories -> rows by the template -> packed once -> shuffled rows -> steps -> validation -> out/model

The run folder holds `metrics.jsonl`, `rejected.jsonl` (trajectories without a row), checkpoints and the exported model:
the best by validation loss where there is a validation set, else the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from astrolabe.model.config import ModelConfig
from astrolabe.records.errors import UsageError
from astrolabe.records.run_store import RunStore
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
from jax_train.loop import StepLoop, Validation, steps_of
from jax_train.losses.sft import sft_loss
from jax_train.packing import Sample, pack
from jax_train.trainer import Trainer, identity, model_fingerprint
from serving.render import Renderer


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
    b = config.batch
    vocab = ModelConfig.from_hf(config.model.path).vocab_size
    rows = packed_rows(inputs.train, b.budget, vocab)
    stream = StepStream(rows, rows_per_batch=b.rows, micro_batches=b.micro_batches, seed=config.seed)
    total = steps_of(config.steps, config.epochs, len(rows), stream.per_step)
    prints = {
        "train": fingerprint(inputs.train),
        "validation": fingerprint(inputs.validation),
        "model": model_fingerprint(config.model.path),
    }
    validation = None
    if inputs.validation:
        validation = Validation(
            pack(inputs.validation, b.rows, b.budget, vocab_size=vocab)[0],
            config.out / "best",
            every=config.eval_every,
            patience=config.patience,
            min_gain=config.min_gain,
        )
    trainer = Trainer.build(config, sft_loss, total)  # first: a model that cannot be read begins no run
    with RunStore.open(config.out, verb="train sft", config=identity(config), seed=config.seed, inputs=prints) as store:
        return StepLoop(
            "sft",
            config,
            trainer,
            store,
            stream,
            total=total,
            fingerprint=prints["train"],
            rejected=inputs.rejected,
            validation=validation,
        ).run()
