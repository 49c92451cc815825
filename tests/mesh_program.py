"""Run in a process of its own with 8 virtual devices (test_mesh.py): gradients and log-probs on several meshes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
from tiny_model import tiny_config
from train_fakes import VOCAB, one_batch, random_samples

from astrolabe.model.decoder import init_decoder, param_axes
from astrolabe.model.safetensors_io import load_params, save_params
from astrolabe.model.sharding import MESH_AXES, tree_shardings
from jax_train.checkpoint import Checkpoints
from jax_train.losses.dpo import DpoHyper, dpo_loss
from jax_train.losses.grpo import GrpoHyper, grpo_loss
from jax_train.losses.sft import sft_loss
from jax_train.mesh import put_batch, use_mesh
from jax_train.packing import PackedBatch, stack
from jax_train.step import (
    Compute,
    init_state,
    make_gradient,
    make_logprob_pass,
    make_optimizer,
    make_schedule,
    make_step,
)

MESHES = {"1": (1, 1, 1, 1), "4": (1, 4, 1, 1), "8": (2, 2, 2, 1), "8 context": (1, 2, 2, 2), "8 data": (8, 1, 1, 1)}
ROWS, BUDGET = 16, 32

CONFIG = tiny_config(vocab_size=VOCAB)


def make_batch() -> PackedBatch:
    return one_batch(random_samples(32, low=8, high=16), ROWS, BUDGET, together=2)


def split(batch: PackedBatch, micro: int) -> PackedBatch:
    """Rows dealt out to micro-batches: [micro, rows / micro, budget]."""
    return jax.tree.map(lambda x: x.reshape(micro, -1, BUDGET), batch)


def make_mesh(shape: tuple[int, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, MESH_AXES, devices=jax.devices()[: int(np.prod(shape))])


def flat(tree: object) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


CASES = [  # loss, mesh, micro-batches; the first of each loss is the reference
    ("sft", "1", 1),
    ("sft", "1", 4),
    ("sft", "4", 2),
    ("sft", "8", 1),
    ("sft", "8 context", 1),
    ("sft", "8 data", 2),
    ("grpo", "1", 1),
    ("grpo", "8", 1),
    ("dpo", "1", 1),
    ("dpo", "8", 1),
]


def gradients(report: dict, batch: PackedBatch) -> None:
    losses = {
        "sft": sft_loss,
        "grpo": grpo_loss(GrpoHyper(normaliser="sequence", max_segments=4, correction="none", kl_beta=0.1)),
        "dpo": dpo_loss(DpoHyper(max_segments=4)),
    }
    references: dict[str, np.ndarray] = {}
    for kind, name, micro in CASES:
        mesh = None if name == "1" else make_mesh(MESHES[name])
        with use_mesh(mesh):
            _, params = init_decoder(CONFIG, 0, mesh=mesh)
            compute = Compute(chunk=16, remat="full" if name == "4" else "none")
            fn = jax.jit(make_gradient(CONFIG, losses[kind], compute))
            grads, total, denominator, _ = fn(params, put_batch(split(batch, micro), mesh))
        found = np.concatenate([flat(grads) / float(denominator), [float(total) / float(denominator)]])
        reference = references.setdefault(kind, found)
        report[f"{kind} on mesh {name}, {micro} micro-batches"] = float(np.abs(found - reference).max())
        print(kind, name, micro, file=sys.stderr, flush=True)


def step_and_checkpoint(report: dict, batch: PackedBatch, folder: Path) -> None:
    """A step on one mesh, saved, restored on another, and stepped there: as if nothing had happened."""
    schedule = make_schedule("constant", 1e-2, 10, 0, 1.0)
    optimizer = make_optimizer(schedule, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01, mu_dtype=None)
    step = make_step(CONFIG, sft_loss, optimizer, schedule, compute=Compute(chunk=16), clip_norm=1.0)

    class Holder:
        def __init__(self, mesh: jax.sharding.Mesh, seed: int) -> None:
            self.mesh = mesh
            with use_mesh(mesh):
                self.state = init_state(init_decoder(CONFIG, seed, mesh=mesh)[1], optimizer)

        def update(self) -> dict:
            with use_mesh(self.mesh):
                self.state, metrics = step(self.state, put_batch(stack([batch]), self.mesh))
            return metrics

    first = Holder(make_mesh(MESHES["8"]), 0)
    first.update()
    Checkpoints(folder / "ckpt", first, fingerprint="x").save(1, {})
    second = Holder(make_mesh(MESHES["4"]), 1)
    assert Checkpoints(folder / "ckpt", second, fingerprint="x").restore() == (1, {})
    report["moments have the weights' shardings"] = float(
        sum(
            a.sharding.spec != b.sharding.spec
            for a, b in zip(
                jax.tree.leaves(first.state.params), jax.tree.leaves(first.state.opt_state[0].mu), strict=True
            )
        )
    )
    report["restored on another mesh"] = float(np.abs(flat(first.state) - flat(second.state)).max())
    report["loss after restore"] = abs(float(first.update()["loss"]) - float(second.update()["loss"]))


def weights_and_logprobs(report: dict, batch: PackedBatch, folder: Path) -> None:
    _, params = init_decoder(CONFIG, 3)
    expected = np.asarray(make_logprob_pass(CONFIG, Compute(chunk=16), 0.7)(params, batch))
    save_params(params, CONFIG, folder / "model")
    mesh = make_mesh(MESHES["8 context"])
    sharded = load_params(folder / "model", CONFIG, mesh)
    wanted = tree_shardings(mesh, param_axes(CONFIG))
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), sharded, wanted))
    with use_mesh(mesh):
        found = np.asarray(make_logprob_pass(CONFIG, Compute(chunk=16), 0.7)(sharded, put_batch(batch, mesh)))
    report["vocab-parallel log-probs"] = float(np.abs(found - expected).max())


if __name__ == "__main__":
    out: dict[str, float] = {}
    data = make_batch()
    gradients(out, data)
    step_and_checkpoint(out, data, Path(sys.argv[1]))
    weights_and_logprobs(out, data, Path(sys.argv[1]))
    print(json.dumps(out))
