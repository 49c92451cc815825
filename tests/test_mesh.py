"""One gradient on every mesh: 1, 4 and 8 virtual devices, in a process of its own (`mesh_program.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import train_fakes

from astrolabe.records.errors import UsageError
from jax_train.mesh import check_mesh, make_mesh, mesh_sizes

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@pytest.mark.slow
def test_gradients_steps_checkpoints_and_logprobs_agree_on_all_meshes(tmp_path: Path) -> None:
    program = Path(__file__).with_name("mesh_program.py")
    env = {**os.environ, "XLA_FLAGS": f"{FLAGS} --xla_llvm_disable_expensive_passes=true", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    # XLA's word for a weight that it gathers whole because our shardings left it no other way.
    assert "rematerialization" not in done.stderr.lower()
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) >= 14
    assert {name: error for name, error in report.items() if not error < 1e-5} == {}


def test_one_size_may_be_the_rest_of_the_devices() -> None:
    assert mesh_sizes({"data": -1, "tensor": 2}, 8) == {"data": 4, "fsdp": 1, "tensor": 2, "context": 1}
    for sizes in ({"data": 3}, {"data": -1, "fsdp": -1}, {"data": -1, "tensor": 3}, {"data": 0}):
        with pytest.raises(UsageError, match="8 devices"):
            mesh_sizes(sizes, 8)


def test_one_device_needs_no_mesh() -> None:
    if jax.device_count() == 1:
        assert make_mesh({"data": -1, "fsdp": 1, "tensor": 1, "context": 1}) is None
        with pytest.raises(UsageError, match="1 devices"):
            make_mesh({"data": 2})


def test_sizes_that_do_not_divide_over_the_mesh_are_named() -> None:
    mesh = jax.sharding.AbstractMesh((1, 1, 4, 1), ("data", "fsdp", "tensor", "context"))
    with pytest.raises(UsageError, match="key-value heads"):
        check_mesh(mesh, train_fakes.QWEN3, rows=4, budget=16)  # type: ignore[arg-type]
