"""Resume: a killed run ends with the weights and losses of an unbroken one, bit for bit, and on its own data only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sft_program import config, inputs
from train_fakes import QWEN3

from astrolabe.records.errors import RunError
from jax_train.phases.sft import train_on

STEPS = 10
MEASURED = ("step_s", "tokens_per_s", "tflops_per_s_per_device")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN3.to_hf()))
    return folder


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    train_on(config(model, out, STEPS), inputs())
    return out


def metrics(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


@pytest.mark.slow
def test_f47_a_run_killed_between_checkpoints_ends_as_if_it_had_not_been(
    model: Path, unbroken: Path, tmp_path: Path
) -> None:
    program = Path(__file__).with_name("sft_program.py")
    out = tmp_path / "killed"
    child = subprocess.Popen(
        [sys.executable, program, model, out, str(STEPS)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert child.stdout is not None
    try:
        for _ in range(5):  # step 3 has a checkpoint, steps 4 and 5 are lost
            assert child.stdout.readline() == "step\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert not (out / "model").exists()
    summary = train_on(config(model, out, STEPS), inputs())
    assert summary["steps"] == STEPS
    assert metrics(out) == metrics(unbroken)
    assert [row["step"] for row in metrics(out)] == list(range(1, STEPS + 1))
    files = ("model/model.safetensors", "model/config.json", "run.json")
    for file in files:
        assert (out / file).read_bytes() == (unbroken / file).read_bytes(), file


def test_f47_a_finished_run_is_left_as_it_is(model: Path, unbroken: Path) -> None:
    before = metrics(unbroken)
    weights = (unbroken / "model" / "model.safetensors").read_bytes()
    train_on(config(model, unbroken, STEPS), inputs())
    assert metrics(unbroken) == before
    assert (unbroken / "model" / "model.safetensors").read_bytes() == weights


def test_f47_other_data_or_another_configuration_cannot_continue_a_run(model: Path, unbroken: Path) -> None:
    with pytest.raises(RunError, match="train"):
        train_on(config(model, unbroken, STEPS), inputs(seed=1))
    with pytest.raises(RunError, match="steps"):
        train_on(config(model, unbroken, STEPS + 1), inputs())


def test_validation_losses_are_logged_and_the_best_model_is_exported(unbroken: Path) -> None:
    found = {row["step"]: row["validation_loss"] for row in metrics(unbroken) if "validation_loss" in row}
    assert set(found) == {4, 8, STEPS}
    assert np.isfinite(list(found.values())).all()
    best = (unbroken / "best" / "model.safetensors").read_bytes()
    assert (unbroken / "model" / "model.safetensors").read_bytes() == best
