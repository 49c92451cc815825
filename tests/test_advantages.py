"""Group advantages on the host."""

from __future__ import annotations

import numpy as np
import pytest

from jax_train.advantages import group_advantages, has_signal


def test_e35_a_group_of_one_is_exactly_zero() -> None:
    assert group_advantages([0.7]).tolist() == [0.0]
    assert group_advantages([0.7, None]).tolist() == [0.0, 0.0]
    assert group_advantages([]).tolist() == []


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3])
def test_d27_a_flat_group_is_exactly_zero(value: float) -> None:
    assert not group_advantages([value] * 7).any()
    assert not group_advantages([value, value + 1e-12, value]).any()
    assert not has_signal([value] * 4)


def test_grpo_centres_and_divides_by_the_population_deviation() -> None:
    found = group_advantages([1.0, 0.0, 0.0, 1.0])
    assert found == pytest.approx([1, -1, -1, 1], abs=1e-5)


def test_dr_grpo_only_centres_and_leave_one_out_uses_the_others() -> None:
    assert group_advantages([1.0, 0.0, 0.5], normalise_std=False) == pytest.approx([0.5, -0.5, 0.0])
    found = group_advantages([1.0, 0.0, 0.5], normalise_std=False, leave_one_out=True)
    assert found == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])


def test_e36_a_rollout_left_out_changes_nobodys_advantage() -> None:
    assert not group_advantages([1.0, 1.0, 1.0, None]).any()
    found = group_advantages([1.0, None, 0.0], normalise_std=False)
    assert found.tolist() == [0.5, 0.0, -0.5]
    assert found.dtype == np.float32


def test_a_reward_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([float("nan"), 1.0])
