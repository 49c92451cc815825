"""Trajectories to training rows, and the stream of steps.

A row is built as a rollout is: the prompt is rendered once, each assistant turn is encoded in the template's own form
with its end token (trained), and what follows it is appended by the template's bridge (not trained). So the ids are
those that the policy will meet, and the trained spans are exactly the assistant's texts. A trajectory that does not
fit, or that the template cannot say by appending, is rejected with its reason; nothing is cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from astrolabe.records.errors import UsageError
from astrolabe.records.jsonl import read_records
from astrolabe.records.trajectory import Trajectory
from jax_train.packing import PackedBatch, Sample, pack, stack
from serving.render import BridgeError, Renderer

ENDLESS = 2**48
"""Rows in a stream: more than any run takes (Grain's own endless repetition overflows for a single row)."""
Rejection = dict[str, Any]
"""A row of `rejected.jsonl`."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which trajectories are trained on. Only finished ones with an assistant turn are, whatever this says."""

    budget: int
    """Tokens that a row holds."""
    min_score: float | None = None
    min_reward: float | None = None


def read_trajectories(paths: Sequence[Path]) -> list[Trajectory]:
    """All rows of trajectory files, or of the trajectories.jsonl or rollouts.jsonl of run folders, in order. UsageError
    names the line that is no trajectory."""
    out: list[Trajectory] = []
    for path in paths:
        file = path
        if path.is_dir():
            found = [path / name for name in ("trajectories.jsonl", "rollouts.jsonl") if (path / name).is_file()]
            if not found:
                raise UsageError(
                    f"{path} holds neither trajectories.jsonl nor rollouts.jsonl", "give a run of synthesis or rollouts"
                )
            file = found[0]
        out += [row for _, row in read_records(file, Trajectory, "give rows of trajectories.jsonl or rollouts.jsonl")]
    return out


def sft_sample(trajectory: Trajectory, renderer: Renderer) -> Sample:
    """The trajectory as one token row; trained are the assistant's turns, each with its end token.

    BridgeError or UsageError where the template cannot say it; ValueError if no assistant speaks.
    """
    messages, tools = trajectory.messages, trajectory.tools
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not turns:
        raise ValueError("no assistant turn")
    tokens = list(renderer.prompt_ids(messages[: turns[0]], tools))
    mask = [0] * len(tokens)
    for turn, at in enumerate(turns):
        output = renderer.completion_ids(messages[at])
        if turn + 1 < len(turns):
            suffix = renderer.bridge(tokens, output, messages[at + 1 : turns[turn + 1]], tools).ids
        else:
            suffix = []
        tokens += [*output, *suffix]
        mask += [1] * len(output) + [0] * len(suffix)
    return Sample(tokens=np.asarray(tokens, np.int32), mask=np.asarray(mask, np.int8), item=trajectory.id)


def sft_samples(
    trajectories: Sequence[Trajectory], renderer: Renderer, selection: Selection
) -> tuple[list[Sample], list[Rejection]]:
    """Samples of the trajectories that can be trained on, and a rejected row for each other."""
    samples: list[Sample] = []
    rejected: list[Rejection] = []
    for trajectory in trajectories:
        reason, detail = _unfit(trajectory, selection), ""
        if reason is None:
            try:
                sample = sft_sample(trajectory, renderer)
            except (BridgeError, UsageError, ValueError) as error:
                reason, detail = "template_cannot_render", str(error)
            else:
                if len(sample) > selection.budget:
                    reason, detail = "too_long", f"{len(sample)} tokens, batch.budget is {selection.budget}"
                else:
                    samples.append(sample)
        if reason is not None:
            rejected.append(
                {"item": trajectory.id, "stage": "sft_rows", "reasons": [reason], "detail": detail, "row": {}}
            )
    return samples, rejected


def _unfit(trajectory: Trajectory, selection: Selection) -> str | None:
    if trajectory.status != "finished":
        return "not_finished"
    if any(verdict.verdict == "unjudged" for verdict in trajectory.verdicts):
        return "unjudged"
    if selection.min_score is not None and (trajectory.score is None or trajectory.score < selection.min_score):
        return "low_score"
    reward = trajectory.reward
    if selection.min_reward is not None and reward is not None and reward.value < selection.min_reward:
        return "low_reward"
    return None


def fingerprint(samples: Sequence[Sample]) -> str:
    """Hash of all tokens and masks, in order: 16 hex digits."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.int64(len(sample)).tobytes())
        digest.update(np.asarray(sample.tokens, np.int32).tobytes())
        digest.update(np.asarray(sample.mask, np.int8).tobytes())
    return digest.hexdigest()[:16]


def packed_rows(samples: Sequence[Sample], budget: int, vocab_size: int, together: int = 1) -> list[PackedBatch]:
    """The samples packed once, one batch of [1, budget] per row: the items that a stream shuffles."""
    return pack(samples, 1, budget, vocab_size=vocab_size, together=together)[0]


class StepStream:
    """Steps of [micro, rows, budget] from packed rows, reshuffled each epoch, for ever; `iterator` holds its place."""

    def __init__(self, rows: Sequence[PackedBatch], *, rows_per_batch: int, micro_batches: int, seed: int) -> None:
        self.rows, self._per_batch, self._micro = list(rows), rows_per_batch, micro_batches
        self.per_step = rows_per_batch * micro_batches
        epochs = ENDLESS // len(self.rows)
        data = grain.MapDataset.source(np.arange(len(self.rows))).shuffle(seed).repeat(epochs)
        # Only indices pass through Grain: threads would cost more than they read.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self.iterator = iter(data.batch(self.per_step).to_iter_dataset(options))

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        chosen = [self.rows[int(i)] for i in next(self.iterator)]
        return stack([join_rows(chosen[i : i + self._per_batch]) for i in range(0, self.per_step, self._per_batch)])


def join_rows(rows: Sequence[PackedBatch]) -> PackedBatch:
    """Batches of one row each as one batch."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)
