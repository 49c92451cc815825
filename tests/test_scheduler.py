"""The scheduler: batches fill whatever fails, nothing waits for ever, and a resumed run is the unbroken one."""

from __future__ import annotations

import asyncio
import json

import pytest
from rollout_fakes import toy_environment

from astrolabe.records.errors import UsageError
from jax_train.filler import Filler, FillerConfig, FillingFailed
from jax_train.groups import Group, Member, Row
from jax_train.scheduler import Scheduler, Slot

ENVIRONMENTS = [toy_environment(a) for a in range(100, 110)]


def group(slot: Slot, rewards: list[float], version: int = 0) -> Group:
    row = Row([1, 2], [0, 1], [float("nan"), -0.5], [-1, version])
    members = [Member(reward=r, accuracy=r, rows=[row], calls=1, errors=0, turns=1, status="finished") for r in rewards]
    return Group(id=slot.id, environment=slot.environment.id, members=members)


def make(roll, *, target: int = 2, **more) -> tuple[Scheduler, Filler[Group]]:
    filler: Filler[Group] = Filler(FillerConfig(target=target, budget=5, max_staleness=more.pop("max_staleness", 0)))
    return Scheduler(ENVIRONMENTS, filler, roll, seed=7, **more), filler


def rewards_of(slot: Slot) -> list[float]:
    return [0.0, 1.0] if slot.seed % 3 else [1.0, 1.0]


async def quick(slot: Slot) -> Group:
    await asyncio.sleep(0.001 * (slot.seed % 5))
    return group(slot, rewards_of(slot))


async def test_every_epoch_visits_every_environment_once_in_a_seeded_order():
    scheduler, _ = make(quick)
    epochs = [[scheduler.slot(10 * e + i).environment.id for i in range(10)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(e.id for e in ENVIRONMENTS)
    assert epochs[0] != epochs[1]
    assert scheduler.slot(3).seed != scheduler.slot(13).seed


async def test_e33_batches_are_full_whatever_is_dropped_and_the_ledger_balances():
    async def roll(slot: Slot) -> Group:
        if slot.position % 4 == 1:
            raise RuntimeError("a bug in one group")
        return await quick(slot)

    scheduler, filler = make(roll, target=4)
    for _ in range(3):
        assert len(await scheduler.fill(0)) == 4
        assert filler.balance() == 0
    assert filler.ledger.dropped["internal"] > 0
    await scheduler.stop()


async def test_e32_environments_without_signal_end_in_an_error_not_in_endless_sampling():
    async def flat(slot: Slot) -> Group:
        return group(slot, [1.0, 1.0])

    scheduler, filler = make(flat)
    with pytest.raises(FillingFailed, match="dropped: flat 10"):
        await scheduler.fill(0)
    assert filler.ledger.dispatched == 10


async def test_f42_a_hung_group_is_given_up_at_its_deadline_and_accounted_for():
    async def roll(slot: Slot) -> Group:
        if slot.position == 0:
            await asyncio.sleep(60)
        return group(slot, [0.0, 1.0])

    scheduler, filler = make(roll, deadline_s=0.05)
    assert len(await scheduler.fill(0)) == 2
    assert filler.ledger.dropped == {"deadline": 1}
    await scheduler.stop()


async def test_a_straggler_holds_nobody_up_when_groups_land_as_they_come():
    release = asyncio.Event()

    async def roll(slot: Slot) -> Group:
        if slot.position == 0:
            await release.wait()
        return group(slot, [0.0, 1.0])

    scheduler, filler = make(roll, synchronous=False)
    batch = await scheduler.fill(0)
    assert scheduler.slot(0).id not in [g.id for g in batch]
    assert scheduler.slot(0).id in filler.in_flight
    release.set()
    await scheduler.stop()


async def test_what_a_user_must_mend_ends_the_run_at_once():
    async def roll(slot: Slot) -> Group:
        raise UsageError("top_p 0.9", "use 1")

    scheduler, _ = make(roll)
    with pytest.raises(UsageError):
        await scheduler.fill(0)
    await scheduler.stop()


async def test_groups_in_flight_are_bounded():
    flying, most = set(), 0

    async def roll(slot: Slot) -> Group:
        nonlocal most
        flying.add(slot.position)
        most = max(most, len(flying))
        await asyncio.sleep(0.001)
        flying.discard(slot.position)
        return group(slot, [0.0, 1.0])

    scheduler, _ = make(roll, target=10, max_in_flight=3)
    await scheduler.fill(0)
    assert most == 3
    await scheduler.stop()


@pytest.mark.parametrize("cut", [1, 3])
async def test_f47_stopping_and_resuming_trains_on_the_groups_of_the_unbroken_run(cut):
    weights = {"version": 0}

    async def roll(slot: Slot) -> Group:
        await asyncio.sleep(0.001 * (slot.seed % 5))
        return group(slot, rewards_of(slot) if (slot.seed + weights["version"]) % 4 else [1, 1], weights["version"])

    async def run(scheduler: Scheduler, versions: range) -> list[list[tuple[str, int]]]:
        batches = []
        for version in versions:
            weights["version"] = version
            batches.append([(g.id, g.oldest_version) for g in await scheduler.fill(version)])
        return batches

    whole, _ = make(roll, target=3, max_staleness=1)
    expected = await run(whole, range(6))
    await whole.stop()
    first, filler = make(roll, target=3, max_staleness=1)
    head = await run(first, range(cut))
    state = json.loads(json.dumps([filler.state_dict(), first.state_dict()]))
    await first.stop()
    second, filler = make(roll, target=3, max_staleness=1)
    filler.load_state_dict(state[0], Group.from_json)
    second.load_state_dict(state[1])
    assert head + await run(second, range(cut, 6)) == expected
    assert filler.balance() == 0
    await second.stop()


async def test_f47_groups_in_flight_are_sampled_again_from_their_own_seeds():
    release = asyncio.Event()

    async def slow(slot: Slot) -> Group:
        await release.wait()
        return group(slot, [0.0, 1.0])

    first, filler = make(slow, synchronous=False)
    first.dispatch(3)
    state = json.loads(json.dumps([filler.state_dict(), first.state_dict()]))
    await first.stop()
    release.set()
    second, filler = make(slow, synchronous=False)
    assert filler.load_state_dict(state[0], Group.from_json) == [first.slot(i).id for i in range(3)]
    second.load_state_dict(state[1])
    assert {g.id for g in await second.fill(0)} <= {first.slot(i).id for i in range(3)}
    assert filler.balance() == 0
    await second.stop()
