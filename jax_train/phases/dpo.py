"""Direct preference optimisation on pairs of the policy's own rollouts.

    preferences + token store -> pairs packed side by side -> the reference's log-probs, once -> steps -> out/model

Tokens and masks come from the token store, never from text. Both sides are trained only from where they part, and
there only on what the policy sampled: tools and template are masked on both sides, and the shared prefix says nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from astrolabe.model.config import ModelConfig
from astrolabe.records.errors import RunError, UsageError
from astrolabe.records.jsonl import as_record, read_records
from astrolabe.records.preference import Preference
from astrolabe.records.run_store import RunStore
from astrolabe.records.token_store import TokenStore
from astrolabe.records.trajectory import Trace
from jax_train.config import DpoConfig
from jax_train.data import Rejection, StepStream, fingerprint, join_rows, packed_rows
from jax_train.loop import StepLoop, steps_of
from jax_train.losses.dpo import DpoHyper, dpo_loss
from jax_train.mesh import use_mesh
from jax_train.packing import PackedBatch, Sample, empty_batch, max_segments
from jax_train.trainer import Trainer, identity, model_fingerprint, read_params


def read_pairs(config: DpoConfig) -> tuple[list[Sample], list[Rejection]]:
    """Samples, chosen and rejected in turn, and a rejected row for each pair that cannot be trained on.

    UsageError where nothing is left or a row is no pair; RunError where the run has no token store or a trace is not
    within it.
    """
    folder = config.data.preferences
    if not (folder / "tokens").is_dir():
        raise RunError(f"{folder}: no token store", "give the run folder that the pairs were mined in")
    store = TokenStore(folder / "tokens", read_only=True)
    samples: list[Sample] = []
    rejected: list[Rejection] = []
    file, mend = folder / "preferences.jsonl", "give the run folder that the pairs were mined in"
    for number, pair in read_records(file, Preference, mend):
        traces = [as_record(Trace, s.trace, f"{file}, line {number}", mend) for s in (pair.chosen, pair.rejected)]
        sides = [_side(store, trace, pair.fork, pair.id) for trace in traces]
        size = sum(map(len, sides))
        if size > config.batch.budget:
            reason, detail = "too_long", f"{size} tokens in both sides, batch.budget is {config.batch.budget}"
        elif not all(np.any(side.mask) for side in sides):
            reason, detail = "nothing_trained", "a side has no sampled token after the fork"
        else:
            samples += sides
            continue
        rejected.append({"item": pair.id, "stage": "dpo_rows", "reasons": [reason], "detail": detail, "row": {}})
    if not samples:
        raise UsageError(
            f"{folder}: no pair can be trained on ({len(rejected)} rejected)", "mine more pairs, or raise batch.budget"
        )
    return samples, rejected


def _side(store: TokenStore, trace: Trace, fork: int, item: str) -> Sample:
    arrays = store.read(trace.start, trace.length)
    mask = arrays.mask.copy()
    mask[:fork] = 0
    return Sample(tokens=arrays.tokens, mask=mask, item=item)


def with_reference(rows: list[PackedBatch], trainer: Trainer, params: Any, rows_per_batch: int) -> list[PackedBatch]:
    """The rows with the log-probs of `params` as the reference's; batches have one shape, the last one filled up."""
    budget = rows[0].shape[-1]
    out: list[PackedBatch] = []
    for start in range(0, len(rows), rows_per_batch):
        some = rows[start : start + rows_per_batch]
        batch = join_rows([*some, *[empty_batch(1, budget)] * (rows_per_batch - len(some))])
        with use_mesh(trainer.mesh):
            found = np.asarray(trainer.logprob_pass(params, trainer.put(batch)))
        out += [replace(row, ref_logprobs=found[i : i + 1]) for i, row in enumerate(some)]
    return out


def run(config: DpoConfig) -> dict[str, Any]:
    """Train, or continue, the run of `config.out`; a summary."""
    return train_on(config, *read_pairs(config))


def train_on(config: DpoConfig, samples: list[Sample], rejected: list[Rejection]) -> dict[str, Any]:
    """The phase on token rows, chosen and rejected in turn."""
    b = config.batch
    vocab = ModelConfig.from_hf(config.model.path).vocab_size
    rows = packed_rows(samples, b.budget, vocab, together=2)
    total = steps_of(config.steps, config.epochs, len(rows), b.rows * b.micro_batches)
    reference = config.data.reference or config.model.path
    prints = {
        "pairs": fingerprint(samples),
        "model": model_fingerprint(config.model.path),
        "reference": model_fingerprint(reference),
    }
    hyper = DpoHyper(**config.loss.model_dump(), max_segments=max(map(max_segments, rows)))
    trainer = Trainer.build(config, dpo_loss(hyper), total)  # first: a model that cannot be read begins no run
    params = trainer.state.params
    if config.data.reference is not None:
        params = read_params(reference, trainer.model, config.seed, trainer.mesh)
    with RunStore.open(config.out, verb="train dpo", config=identity(config), seed=config.seed, inputs=prints) as store:
        rows = with_reference(rows, trainer, params, b.rows)
        del params  # the reference is its numbers from here on
        stream = StepStream(rows, rows_per_batch=b.rows, micro_batches=b.micro_batches, seed=config.seed)
        return StepLoop(
            "dpo", config, trainer, store, stream, total=total, fingerprint=prints["pairs"], rejected=rejected
        ).run()
