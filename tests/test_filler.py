"""The batch filler: full batches of groups that teach something, and a ledger that balances whatever happens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_train.filler import Filler, FillerConfig, FillingFailed


@dataclass(frozen=True)
class Fake:
    id: str
    rewards: tuple[float, ...]
    oldest_version: int = 0
    accuracies: tuple[float, ...] = field(default=())

    def values(self, key: str) -> tuple[float, ...]:
        return self.rewards if key == "reward" else self.accuracies

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict) -> Fake:
        return cls(row["id"], tuple(row["rewards"]), row["oldest_version"], tuple(row["accuracies"]))


def filler(target: int = 2, **more: object) -> Filler[Fake]:
    return Filler(FillerConfig(target=target, **more))


def feed(machine: Filler[Fake], *rewards: tuple[float, ...], version: int = 0, prefix: str = "g") -> list[str | None]:
    out = []
    for rewarded in rewards:
        name = f"{prefix}{machine.ledger.dispatched}"
        machine.dispatch(name)
        out.append(machine.offer(Fake(name, rewarded, version)))
    return out


def test_only_groups_whose_reward_varies_are_kept():
    machine = filler(3)
    assert feed(machine, (1, 1, 1), (0, 0), (0, 1), (0.5, 0.5 + 1e-7), (0.50, 0.51)) == [
        "flat",
        "flat",
        None,
        "flat",
        None,
    ]


def test_the_efficiency_signal_among_equally_right_rollouts_is_kept_unless_accuracy_is_the_key():
    group = Fake("a", (0.5, 0.8), accuracies=(1.0, 1.0))
    by_reward, by_accuracy = filler(), filler(key="accuracy")
    for machine in (by_reward, by_accuracy):
        machine.dispatch("a")
    assert by_reward.offer(group) is None
    assert by_accuracy.offer(group) == "flat"


def test_e35_a_group_of_one_is_dropped_and_a_partial_group_of_two_is_kept():
    assert feed(filler(), (1.0,), (0.0, 1.0)) == ["singleton", None]


def test_e36_a_group_whose_only_zero_was_an_infra_failure_has_no_signal():
    # The failed fourth rollout is not among the values; a policy's own timeout is, as 0.
    assert feed(filler(), (1, 1, 1), (1, 1, 1, 0), ()) == ["flat", None, "failed"]


def test_e33_a_batch_is_exactly_full_or_not_handed_out():
    machine = filler(2)
    feed(machine, (0, 1), (1, 1))
    assert machine.take(0) is None
    feed(machine, (0, 1), (0, 1))
    assert [group.id for group in machine.take(0)] == ["g0", "g2"]


def test_e37_surplus_is_carried_over_within_the_staleness_bound():
    machine = filler(2, max_staleness=1)
    feed(machine, (0, 1), (0, 1), (0, 1), (0, 1), (0, 1))
    assert len(machine.take(0)) == 2
    assert [group.id for group in machine.take(1)] == ["g2", "g3"]
    assert machine.take(2) is None
    assert machine.ledger.dropped == {"stale": 1}
    assert machine.balance() == 0


def test_e32_a_spent_budget_is_an_error_that_names_the_drop_counts():
    machine = filler(2, budget=3)
    feed(machine, (0, 1), (1, 1), (1, 1), (0, 0), (), (2.0,))
    assert machine.wanted() == 0
    with pytest.raises(FillingFailed, match=r"6 groups: 1 of 2 kept; dropped: failed 1, flat 3, singleton 1"):
        machine.take(0)


def test_the_budget_is_per_batch():
    machine = filler(1, budget=2)
    for _ in range(5):
        feed(machine, (1, 1), (0, 1))
        assert machine.take(0) is not None


def test_dispatch_follows_the_observed_acceptance_rate_and_what_is_in_flight():
    machine = filler(4, budget=100)
    assert machine.wanted() == 8
    feed(machine, *[(1, 1)] * 18, (0, 1), (0, 1))
    assert machine.wanted() == 15  # 2 missing at (2 + 1) / (20 + 2)
    machine.dispatch("x")
    assert machine.wanted() == 14


def test_nothing_is_offered_twice_or_undispatched():
    machine = filler()
    machine.dispatch("a")
    with pytest.raises(ValueError, match="already"):
        machine.dispatch("a")
    machine.offer(Fake("a", (0, 1)))
    with pytest.raises(ValueError, match="not dispatched"):
        machine.offer(Fake("a", (0, 1)))
    with pytest.raises(ValueError, match="not finite"):
        machine.offer(Fake("b", (float("nan"), 1)))


events = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "offer", "give_up", "take", "resume"]),
        st.integers(0, 7),
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=4),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(events, st.integers(1, 4), st.integers(0, 2))
def test_e37_dispatched_is_always_trained_buffered_in_flight_or_dropped(script, target, staleness):
    machine = filler(target, max_staleness=staleness, budget=3)
    flying: list[str] = []
    version, trained = 0, []
    for step, (event, index, rewards) in enumerate(script):
        if event == "dispatch":
            machine.dispatch(f"g{step}")
            flying.append(f"g{step}")
        elif event in ("offer", "give_up") and flying:
            name = flying.pop(index % len(flying))
            if event == "offer":
                machine.offer(Fake(name, tuple(rewards), version))
            else:
                machine.give_up(name, "deadline")
        elif event == "take":
            try:
                batch = machine.take(version)
            except FillingFailed:
                assert not flying
                batch = None
            if batch is not None:
                assert len(batch) == target
                assert all(version - group.oldest_version <= staleness for group in batch)
                assert all(max(g.rewards) > min(g.rewards) for g in batch)
                trained += [group.id for group in batch]
                version += 1
        elif event == "resume":
            state = json.loads(json.dumps(machine.state_dict()))
            machine = filler(target, max_staleness=staleness, budget=3)
            assert machine.load_state_dict(state, Fake.from_json) == flying
            assert json.loads(json.dumps(machine.state_dict())) == state
        assert machine.balance() == 0
    assert len(trained) == len(set(trained)) == machine.ledger.trained
