"""Run in a process of its own (test_checkpoint.py): an SFT run on made-up rows, to be killed on the way.

Arguments: model folder, out folder, steps. Prints a line for each finished step.
"""

from __future__ import annotations

import sys
from pathlib import Path

from train_fakes import random_samples

from jax_train.config import SftConfig, load_config
from jax_train.phases.sft import SftInputs, train_on
from jax_train.trainer import Trainer


def config(model: Path, out: Path, steps: int) -> SftConfig:
    flags = ["--model.path", str(model), "--out", str(out), "--data.train", '["rows"]', "--steps", str(steps)]
    flags += ["--batch.rows", "2", "--batch.budget", "32", "--checkpoint.every", "3", "--eval_every", "4"]
    flags += ["--optimizer.lr", "3e-3", "--optimizer.warmup_steps", "2", "--model.logprob_chunk", "16"]
    loaded = load_config("sft", None, flags)
    assert isinstance(loaded, SftConfig)
    return loaded


def inputs(seed: int = 0) -> SftInputs:
    return SftInputs(random_samples(24, seed=seed), random_samples(4, seed=9), [])


if __name__ == "__main__":
    plain = Trainer.update

    def update(self: Trainer, batch: object) -> dict[str, float]:
        report = plain(self, batch)  # type: ignore[arg-type]
        print("step", flush=True)
        return report

    Trainer.update = update  # type: ignore[method-assign,assignment]
    train_on(config(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])), inputs())
