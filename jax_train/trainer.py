"""From a configuration to a model that can be trained: weights on the mesh, state, step, log-prob pass, export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import Params, init_decoder
from astrolabe.model.safetensors_io import load_params, save_params
from jax_train.config import TrainConfig
from jax_train.losses.base import Loss
from jax_train.mesh import check_mesh, make_mesh, put_batch, use_mesh
from jax_train.packing import PackedBatch
from jax_train.step import (
    Compute,
    Step,
    TrainState,
    init_state,
    make_eval,
    make_logprob_pass,
    make_optimizer,
    make_schedule,
    make_step,
)


@dataclass
class Trainer:
    """Owns the train state; `step` and `logprob_pass` take batches that `put` laid out."""

    model: ModelConfig
    mesh: Mesh | None
    state: TrainState
    step: Step
    logprob_pass: Callable[[Params, PackedBatch], jax.Array]
    eval_pass: Callable[[Params, PackedBatch], tuple[jax.Array, jax.Array]]
    tokenizer_dir: Path

    @classmethod
    def build(cls, config: TrainConfig, loss: Loss, total_steps: int) -> Trainer:
        """The model of `config.model` (weights from its folder, or from the seed where it has none), at step 0."""
        model = ModelConfig.from_hf(config.model.path)
        mesh = make_mesh(config.mesh.model_dump())
        check_mesh(mesh, model, config.batch.rows, config.batch.budget)
        o = config.optimizer
        schedule = make_schedule(o.schedule, o.lr, total_steps, o.warmup_steps, o.final_fraction)
        optimizer = make_optimizer(
            schedule, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, mu_dtype=o.mu_dtype
        )
        compute = compute_of(config)
        with use_mesh(mesh):
            state = init_state(read_params(config.model.path, model, config.seed, mesh), optimizer)
        return cls(
            model=model,
            mesh=mesh,
            state=state,
            step=make_step(model, loss, optimizer, schedule, compute=compute, clip_norm=o.clip_norm),
            logprob_pass=make_logprob_pass(model, compute),
            eval_pass=make_eval(model, loss, compute),
            tokenizer_dir=config.model.path,
        )

    def put(self, batch: PackedBatch) -> PackedBatch:
        return put_batch(batch, self.mesh)

    def update(self, micro: PackedBatch) -> dict[str, float]:
        """One optimizer step on host arrays [micro, rows, budget]; its metrics on the host."""
        with use_mesh(self.mesh):
            self.state, report = self.step(self.state, self.put(micro))
        return {name: float(value) for name, value in jax.device_get(report).items()}

    def evaluate(self, batches: list[PackedBatch]) -> float:
        """The loss over host batches [rows, budget], by their common denominator."""
        with use_mesh(self.mesh):
            parts = jax.device_get([self.eval_pass(self.state.params, self.put(batch)) for batch in batches])
        return float(sum(p[0] for p in parts) / max(1.0, sum(p[1] for p in parts)))

    def export(self, folder: Path) -> Path:
        """The weights as a Hugging Face folder, with the tokenizer."""
        return save_params(self.state.params, self.model, folder, tokenizer_dir=self.tokenizer_dir)


def compute_of(config: TrainConfig) -> Compute:
    m = config.model
    return Compute(dtype=m.dtype, remat=m.remat, unroll=m.unroll, chunk=m.logprob_chunk)


def read_params(path: Path, model: ModelConfig, seed: int, mesh: Mesh | None) -> Params:
    """Float32 weights of a model folder; fresh ones from the seed where it holds none."""
    if any(path.glob("*.safetensors")):
        return load_params(path, model, mesh)
    return init_decoder(model, seed, jnp.float32, mesh)[1]


def model_fingerprint(path: Path) -> str:
    """Hash of a model folder's configuration and weights: 16 hex digits."""
    digest = hashlib.sha256(json.dumps(ModelConfig.from_hf(path).to_hf(), sort_keys=True).encode())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as source:
            while block := source.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def identity(config: TrainConfig) -> dict[str, Any]:
    """The configuration without paths, and without what does not change the result: what makes it the same run."""
    without: dict[str, Any] = dict.fromkeys(
        ("out", "seed", "mesh", "distributed", "environments", "data", "checkpoint"), True
    )
    return config.model_dump(mode="json", exclude={**without, "model": {"path"}, "engine": {"base_url", "slots"}})
