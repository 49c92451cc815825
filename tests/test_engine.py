"""The embedded engine: log-probs are the trainer's, results do not depend on company, nothing old survives new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import tiny_config

from astrolabe.model.decoder import Params, head_weights, hidden, init_decoder
from astrolabe.model.logprobs import token_logprobs
from astrolabe.records.errors import UsageError
from serving.chat import ModelFailure
from serving.engine.device import _pick, _truncate
from serving.engine.engine import Engine
from serving.engine.runner import uniform_numbers
from serving.tokens import Generation, Sampling

CONFIG = tiny_config(
    vocab_size=96, hidden_size=64, intermediate_size=96, head_dim=16, tie_embeddings=False, max_position=256
)
STOP = 7


def weights(seed: int) -> Params:
    params = init_decoder(CONFIG, seed)[1]
    return {**params, "head": params["head"] * 2}  # far from uniform, so that weights matter


PARAMS, OTHER = weights(0), weights(1)


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    with Engine((CONFIG, PARAMS), slots=4, max_len=192, stop_ids=[STOP]) as engine:
        yield engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine((CONFIG, PARAMS), slots=4, max_len=192, stop_ids=[]) as engine:
        yield engine


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, 96, length).tolist()


@partial(jax.jit, static_argnames=("length",))
def _row_logprobs(params: Params, row: jax.Array, count: jax.Array, temperature: float, length: int) -> jax.Array:
    order = jnp.arange(length, dtype=jnp.int32)[None]
    states = hidden(params, CONFIG, row, order, (order < count).astype(jnp.int32))
    return token_logprobs(states[0, :-1], head_weights(params), row[0, 1:], temperature)[0]


def trainer_logprobs(params: Params, ids: list[int], start: int, temperature: float) -> np.ndarray:
    """Log-probs of ids[start:] as the trainer computes them: one packed, padded row."""
    length = 256
    row = np.zeros((1, length), np.int32)
    row[0, : len(ids)] = ids
    logp = _row_logprobs(params, row, len(ids), temperature, length)
    return np.asarray(logp)[start - 1 : len(ids) - 1]


async def run(engine: Engine, ids: list[int], **sampling: object) -> Generation:
    return await engine.client(allow_truncated=True).generate(ids, Sampling(**sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
async def test_f38_log_probs_are_the_trainers_after_temperature(shared_engine: Engine, temperature: float) -> None:
    ids = prompt(37)
    out = await run(shared_engine, ids, max_new_tokens=40, temperature=temperature, seed=3)
    assert len(out.logprobs) == len(out.output_ids)
    expected = trainer_logprobs(PARAMS, ids + out.output_ids, len(ids), temperature)
    np.testing.assert_allclose(out.logprobs, expected, atol=2e-5)
    if temperature != 1.0:
        scaled = trainer_logprobs(PARAMS, ids + out.output_ids, len(ids), 1.0) / temperature
        assert np.abs(out.logprobs - scaled).max() > 1e-2


async def test_f38_truncated_sampling_reports_the_full_distribution_and_is_refused_for_training(
    shared_engine: Engine,
) -> None:
    ids = prompt(20)
    out = await run(shared_engine, ids, max_new_tokens=12, top_p=0.5, top_k=5, seed=1)
    np.testing.assert_allclose(out.logprobs, trainer_logprobs(PARAMS, ids + out.output_ids, 20, 1.0), atol=2e-5)
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=5)):
        with pytest.raises(UsageError, match="truncated"):
            await shared_engine.client().generate(ids, sampling)


async def test_f40_no_cached_prefix_survives_a_weight_swap(engine: Engine) -> None:
    ids = prompt(60)
    first = await run(engine, ids, max_new_tokens=8, temperature=0.0)
    again = await run(engine, ids, max_new_tokens=8, temperature=0.0)
    assert again.output_ids == first.output_ids
    assert (first.cached_tokens, again.cached_tokens) == (0, 59)
    await asyncio.wrap_future(engine.swap(OTHER, 1))
    new = await run(engine, ids, max_new_tokens=8, temperature=0.0)
    assert new.cached_tokens == 0
    assert new.weight_version == 1
    np.testing.assert_allclose(new.logprobs, trainer_logprobs(OTHER, ids + new.output_ids, 60, 1.0), atol=2e-5)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_f40_a_request_that_a_swap_meets_goes_on_and_says_which_version_gave_each_token(
    engine: Engine, mode: str
) -> None:
    client = engine.client()
    ids = prompt(24, 5)
    chunk_seen = asyncio.Event()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()
    engine.submit(
        ids,
        Sampling(max_new_tokens=120, seed=9),
        lambda result: loop.call_soon_threadsafe(done.set_result, result),
        progress=lambda _: loop.call_soon_threadsafe(chunk_seen.set),
    )
    await chunk_seen.wait()
    await client.pause(mode)  # type: ignore[arg-type]
    await asyncio.wrap_future(engine.swap(OTHER, 4))
    await client.continue_()
    request = await done
    versions = request.versions  # type: ignore[attr-defined]
    output, logprobs = request.output, np.asarray(request.logprobs)  # type: ignore[attr-defined]
    before = versions.count(0)
    assert versions == [0] * before + [4] * (120 - before)
    assert 0 < before < 120
    old = trainer_logprobs(PARAMS, ids + output, len(ids), 1.0)
    new = trainer_logprobs(OTHER, ids + output, len(ids), 1.0)
    np.testing.assert_allclose(logprobs[:before], old[:before], atol=2e-5)
    if mode == "retract":  # computed again: exactly what the new weights say of the whole context
        np.testing.assert_allclose(logprobs[before:], new[before:], atol=2e-5)
    else:
        assert np.abs(logprobs[before:] - new[before:]).max() > 1e-3
    assert (await run(engine, ids + output, max_new_tokens=2)).cached_tokens == (
        0 if mode == "in_place" else len(ids + output) - 1
    )


async def test_results_do_not_depend_on_what_else_is_in_the_batch(shared_engine: Engine, engine: Engine) -> None:
    jobs = [(prompt(10 + 7 * i, i), {"max_new_tokens": 10 + 3 * i, "seed": i, "temperature": 0.8}) for i in range(9)]
    together = await asyncio.gather(*(run(engine, ids, **options) for ids, options in jobs))
    await engine.client().flush_cache()
    for (ids, options), expected in zip(reversed(jobs), reversed(together), strict=True):
        alone = await run(engine, ids, **options)
        assert alone.output_ids == expected.output_ids
        np.testing.assert_allclose(alone.logprobs, expected.logprobs, atol=2e-5)


async def test_equal_seeds_repeat_and_others_differ(shared_engine: Engine) -> None:
    ids = prompt(12)
    one, two, other = [await run(shared_engine, ids, max_new_tokens=20, seed=s) for s in (5, 5, 6)]
    assert one.output_ids == two.output_ids
    assert one.output_ids != other.output_ids


async def test_a_group_shares_its_prompt_and_differs_by_seed(engine: Engine) -> None:
    ids = prompt(100)
    before = engine.counters["prefill_tokens"]
    outs = await asyncio.gather(*(run(engine, ids, max_new_tokens=10, seed=s) for s in range(8)))
    assert engine.counters["prefill_tokens"] - before <= 99 + 8
    assert len({tuple(out.output_ids) for out in outs}) == 8
    for out in outs:
        np.testing.assert_allclose(out.logprobs, trainer_logprobs(PARAMS, ids + out.output_ids, 100, 1.0), atol=2e-5)


async def test_the_next_turn_finds_its_conversation_in_the_cache(engine: Engine) -> None:
    async def conversation(seed: int) -> None:
        ids, length = prompt(20, seed), 0
        for turn in range(3):
            out = await run(engine, ids, max_new_tokens=6, seed=turn)
            assert out.cached_tokens == length
            np.testing.assert_allclose(
                out.logprobs, trainer_logprobs(PARAMS, ids + out.output_ids, len(ids), 1.0), atol=2e-5
            )
            length = len(ids + out.output_ids) - 1
            ids = ids + out.output_ids + prompt(5, 100 + turn)

    await asyncio.gather(*(conversation(seed) for seed in range(4)))


async def test_a_stop_id_ends_the_turn_and_stays_in_the_output(shared_engine: Engine) -> None:
    seen = set()
    for seed in range(40):
        out = await run(shared_engine, prompt(9, seed), max_new_tokens=60, seed=seed, temperature=2.5)
        seen.add(out.finish_reason)
        if out.finish_reason == "stop":
            assert out.output_ids[-1] == STOP
            assert out.output_ids.count(STOP) == 1
        else:
            assert STOP not in out.output_ids
            assert len(out.output_ids) == 60
    assert seen == {"stop", "length"}


async def test_request_stop_ids_add_to_the_models(shared_engine: Engine) -> None:
    free = await run(shared_engine, prompt(9), max_new_tokens=12, seed=0)
    target = free.output_ids[5]
    out = await run(shared_engine, prompt(9), max_new_tokens=12, seed=0, stop_token_ids=(target, *range(80, 95)))
    assert out.finish_reason == "stop"
    assert out.output_ids == free.output_ids[: len(out.output_ids)]


async def test_f45_output_is_clipped_to_the_context_and_a_prompt_over_it_is_refused(shared_engine: Engine) -> None:
    out = await run(shared_engine, prompt(180), max_new_tokens=500, seed=0, temperature=0.3)
    assert out.finish_reason == "stop" or len(out.output_ids) == 12
    for bad, text in ((prompt(192), "context length"), ([], "empty"), ([96], "below 96"), ([-1], "below 96")):
        with pytest.raises(ModelFailure, match=text) as caught:
            await run(shared_engine, bad)
        assert caught.value.kind == "bad_request"


async def test_abort_ends_one_request_or_all(engine: Engine) -> None:
    client = engine.client()
    tasks = [
        asyncio.create_task(client.generate(prompt(9, i), Sampling(max_new_tokens=180, seed=i), rid=f"r{i}"))
        for i in range(6)
    ]
    await asyncio.sleep(0)
    await client.pause("in_place")
    await client.abort("r1")
    out = await tasks[1]
    assert out.finish_reason == "abort"
    assert len(out.logprobs) == len(out.output_ids)
    await client.abort()
    await client.continue_()
    rest = await asyncio.gather(*tasks)
    assert {r.finish_reason for r in rest} <= {"abort", "length"}
    assert engine.running == engine.queued == 0
    assert (await run(engine, prompt(9), max_new_tokens=3)).finish_reason == "length"


async def test_a_cancelled_caller_frees_its_slot(engine: Engine) -> None:
    client = engine.client()
    await client.pause()
    task = asyncio.create_task(client.generate(prompt(9), Sampling(max_new_tokens=150)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.continue_()
    await run(engine, prompt(5), max_new_tokens=2)
    assert engine.counters["finished_abort"] == 1


async def test_flush_is_refused_while_requests_run(engine: Engine) -> None:
    client = engine.client()
    await client.pause("in_place")
    task = asyncio.create_task(client.generate(prompt(9), Sampling(max_new_tokens=5)))
    await asyncio.sleep(0.05)
    with pytest.raises(ModelFailure, match="requests run"):
        await client.flush_cache()
    await client.continue_()
    await task
    await client.flush_cache()
    assert (await run(engine, prompt(9), max_new_tokens=2)).cached_tokens == 0


async def test_f42_a_failure_in_the_loop_fails_the_requests_and_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import serving.engine.runner as module

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(module, "decode_chunk", broken)
    with Engine((CONFIG, PARAMS), slots=2, max_len=64) as engine:
        with pytest.raises(ModelFailure, match="device lost"):
            await run(engine, prompt(5))
        with pytest.raises(ModelFailure, match="device lost"):
            await run(engine, prompt(5))
        with pytest.raises(ModelFailure, match="device lost"):
            await engine.client().pause()


async def test_the_trainer_may_donate_its_weights_after_a_swap(engine: Engine) -> None:
    mine = jax.tree.map(jnp.array, OTHER)
    await asyncio.wrap_future(engine.swap(mine, 1))
    jax.tree.map(lambda x: x.delete(), mine)
    out = await run(engine, prompt(9), max_new_tokens=4, seed=0)
    np.testing.assert_allclose(out.logprobs, trainer_logprobs(OTHER, prompt(9) + out.output_ids, 9, 1.0), atol=2e-5)


async def test_a_trainers_mesh_does_not_reach_the_engine() -> None:
    mesh = jax.make_mesh((1, 1, 1, 1), ("data", "fsdp", "tensor", "context"))
    sharded = init_decoder(CONFIG, 0, mesh=mesh)[1]
    with jax.set_mesh(mesh), Engine((CONFIG, sharded), slots=4, max_len=192, stop_ids=[]) as engine:
        first = await run(engine, prompt(9), max_new_tokens=4, seed=0)
        await asyncio.wrap_future(engine.swap(sharded, 1))
        assert (await run(engine, prompt(9), max_new_tokens=4, seed=0)).output_ids == first.output_ids


async def test_the_cache_grows_with_what_requests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.engine.runner.FIRST_LENGTH", 96)
    with Engine((CONFIG, PARAMS), slots=4, max_len=192, stop_ids=[]) as engine:
        ids = prompt(120)
        out = await run(engine, ids, max_new_tokens=20, seed=0)
        np.testing.assert_allclose(out.logprobs, trainer_logprobs(PARAMS, ids + out.output_ids, 120, 1.0), atol=2e-5)
        assert engine._runner.length == 192


def test_sampling_follows_the_distribution() -> None:
    logits = jnp.asarray([2.0, 1.0, 0.0, -jnp.inf, 0.5] * 30)
    rows = 4000
    uniform = jnp.asarray((np.arange(rows) + 0.5) / rows, jnp.float32)
    picked = np.asarray(jax.jit(_pick)(jnp.tile(logits, (rows, 1)), uniform))
    share = np.bincount(picked, minlength=150) / rows
    np.testing.assert_allclose(share, np.asarray(jax.nn.softmax(logits)), atol=1.5 / rows)
    edges = np.asarray(_pick(jnp.tile(logits, (2, 1)), jnp.asarray([0.0, 1.0 - 2.0**-24])))
    assert edges.tolist() == [0, 149]


def test_truncation_keeps_the_most_likely() -> None:
    logits = jnp.log(jnp.asarray([[0.1, 0.5, 0.4]] * 4))
    kept = _truncate(logits, jnp.asarray([0.4, 0.6, 1.0, 1.0]), jnp.asarray([-1, -1, 2, 1]))
    assert np.isfinite(np.asarray(kept)).tolist() == [
        [False, True, False],
        [False, True, True],
        [False, True, True],
        [False, True, False],
    ]


def test_uniform_numbers_depend_on_seed_and_position_alone() -> None:
    seeds = np.asarray([1, 2, 1], np.uint64)
    table = uniform_numbers(seeds, np.asarray([0, 0, 3]), 8)
    assert table[0, 3:].tolist() == table[2, :5].tolist()
    assert not np.array_equal(table[0], table[1])
    many = uniform_numbers(np.arange(2000, dtype=np.uint64), np.zeros(2000, np.int64), 8)
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01
    assert np.abs(np.corrcoef(many.T) - np.eye(8)).max() < 0.08
