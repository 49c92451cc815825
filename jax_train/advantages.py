"""Group advantages, on the host: numbers that the loss takes as constants.

A group is several rollouts of one task. Its advantages are rewards less their mean (or less the mean of the others),
divided by the deviation if asked. A flat group and a group of one give exact zeros: no noise of rounding becomes a
signal, and a reward is never its own advantage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FLAT = 1e-9
"""Rewards that differ by no more than this are equal."""


def group_advantages(
    rewards: Sequence[float | None],
    *,
    normalise_std: bool = True,
    leave_one_out: bool = False,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """One group's advantages [n] float32. A reward of None is a rollout left out (not the policy's doing): 0 for it.

    normalise_std: GRPO (population deviation); off is Dr. GRPO. leave_one_out: RLOO's baseline, the mean of the others.
    """
    out = np.zeros(len(rewards), np.float32)
    valid = [i for i, reward in enumerate(rewards) if reward is not None]
    values = np.asarray([rewards[i] for i in valid], np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"a reward is not finite: {values.tolist()}")
    if not has_signal(rewards):
        return out
    centred = values - values.mean()
    if leave_one_out:
        centred = centred * len(values) / (len(values) - 1)
    if normalise_std:
        centred = centred / (values.std() + epsilon)
    out[valid] = centred
    return out


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether the group has at least two valid rollouts whose rewards differ."""
    values = [reward for reward in rewards if reward is not None]
    return len(values) >= 2 and max(values) - min(values) > FLAT
