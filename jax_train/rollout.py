"""A run of rollouts: one environment is one item of the run, whose rows and tokens are committed together.

`rollout_file` is behind `astrolabe rollout`; `commit_rollouts` is how every phase stores rollouts: rows with their
traces, the token arrays beside them, and what failed among the rejected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.base import Usage
from astrolabe.records.environment import Environment, read_environments
from astrolabe.records.errors import ServerError
from astrolabe.records.ids import content_hash, seed_for
from astrolabe.records.reply_store import ReplyStore
from astrolabe.records.run_store import RunStore
from astrolabe.records.trajectory import Trace
from graphs.batch import BatchReport, Item, Outcome, run_batch
from graphs.solver import Budgets, Policy
from graphs.solver_policies import ChatPolicy
from graphs.token_policy import TokenPolicy
from jax_train.groups import Opener, RewardKind, Rollout, RolloutConfig, roll_group, sandboxed
from jax_train.trainer import model_fingerprint
from serving.chat import ChatClient, ModelFailure, ModelSpec
from serving.render import Renderer, check_template
from serving.tokens import HttpTokenClient, Sampling

log = logging.getLogger(__name__)


def stored_rows(rollouts: Sequence[Rollout], store: RunStore) -> list[dict[str, Any]]:
    """Rows of `rollouts.jsonl`; their tokens are appended to the run's token store. Call it only in a commit."""
    rows = []
    for rollout in rollouts:
        traces = []
        for branch in rollout.tape.branches if rollout.tape is not None else []:
            start = store.tokens.append(branch.tokens, branch.mask, branch.logprobs, branch.versions)
            traces.append(
                Trace(
                    start=start,
                    length=len(branch.tokens),
                    parent=branch.parent,
                    fork=branch.fork,
                    segments=branch.segments,
                )
            )
        rows.append(rollout.trajectory.model_copy(update={"traces": traces}).to_json())
    return rows


def group_outcome(item: str, rollouts: Sequence[Rollout]) -> Outcome:
    """What a group leaves in its run: scored rollouts as rows, failed ones among the rejected with `infra_` reasons."""
    scored = [rollout for rollout in rollouts if rollout.scored]
    reasons: dict[str, int] = {}
    rejected = []
    for rollout in rollouts:
        if not rollout.scored:
            reason = f"infra_{rollout.trajectory.failure or 'failed'}"
            reasons[reason] = reasons.get(reason, 0) + 1
            rejected.append(
                {
                    "item": item,
                    "stage": "rollout",
                    "reasons": [reason],
                    "detail": f"rollout {rollout.index}, {rollout.attempts} attempts",
                    "row": rollout.trajectory.to_json(),
                }
            )
    usage = Usage()
    for rollout in rollouts:
        usage += rollout.trajectory.provenance.usage or Usage()
    return Outcome(
        rejected=rejected,
        funnel=[("rollout", len(rollouts), len(scored), reasons)],
        timings=[
            {"id": r.trajectory.id, "index": r.index, "attempts": r.attempts, "seconds": round(r.seconds, 4)}
            for r in rollouts
        ],
        usage=usage,
        at_commit=lambda store: {"rollouts": stored_rows(scored, store)},
    )


async def roll_into(
    store: RunStore,
    environments: Sequence[Environment],
    policy: Policy,
    opener: Opener,
    config: RolloutConfig,
    *,
    seed: int,
    concurrency: int = 8,
    progress: bool = True,
) -> BatchReport:
    """Groups of all environments into an open run, which continues where it stood. `concurrency` counts groups."""

    async def work(item: Item[Environment]) -> Outcome:
        return group_outcome(item.key, await roll_group(item.value, policy, opener, config, seed=seed))

    items = [Item(environment.id, environment) for environment in environments]
    return await run_batch(items, work, store, concurrency=concurrency, what="rollouts", progress=progress)


def rollout_file(
    envs: Path,
    model_url: str,
    n: int,
    out: Path,
    *,
    model: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    concurrency: int = 8,
    temperature: float = 1.0,
    max_new_tokens: int = 256,
    budgets: Budgets | None = None,
    reward: RewardKind = "f1",
    sandbox_level: str = "auto",
    progress: bool = True,
) -> BatchReport:
    """`n` rollouts of a served policy in each environment of a file, into the run folder `out`.

    With `model` (a folder with the policy's tokenizer; by default the server's own, where it names one that is here)
    the policy acts through `/generate` and every rollout has its tokens; else through chat completions, and has none.
    `concurrency` counts environments."""
    config = RolloutConfig(n=n, budgets=budgets or Budgets(), reward=reward)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
    environments = read_environments(envs, limit)
    identity = {
        "n": n,
        "reward": reward,
        "budgets": vars(config.budgets),
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "limit": limit,
    }

    async def main() -> BatchReport:
        inputs = {
            "envs": content_hash([environment.id for environment in environments]),
            "policy": await served_identity(model_url),
        }
        with RunStore.open(
            out, verb="rollout", config=identity, seed=seed, inputs=inputs, files=("rollouts",)
        ) as store:
            policy = served_policy(model_url, model, sampling, concurrency * n, replies=store.replies)
            async with acting(policy, config.budgets, sandbox_level) as (actor, opener):
                return await roll_into(
                    store,
                    environments,
                    actor,
                    opener,
                    config,
                    seed=seed_for(seed, "rollout"),
                    concurrency=concurrency,
                    progress=progress,
                )

    return asyncio.run(main())


Opened = tuple[Policy, Callable[[], Awaitable[None]]]
"""A policy and its close."""


@asynccontextmanager
async def acting(
    policy: Awaitable[Opened], budgets: Budgets, sandbox_level: str = "auto"
) -> AsyncIterator[tuple[Policy, Opener]]:
    """(policy, opener of its episodes) with a sandbox of their own; both are closed at the end."""
    actor, close = await policy
    sandbox = Sandbox(sandbox_level)
    try:
        yield actor, sandboxed(sandbox, budgets)
    finally:
        sandbox.close()
        await close()


async def served_policy(
    model_url: str,
    folder: Path | None,
    sampling: Sampling,
    concurrency: int,
    *,
    replies: ReplyStore | None = None,
) -> Opened:
    """(policy, its close) over a server. ServerError if nobody answers there. `replies` stores those of a chat server."""
    tokens = HttpTokenClient(model_url, concurrency=concurrency, allow_truncated=True)
    folder = folder or _local_model(await _model_info(tokens))
    if folder is not None:
        renderer = Renderer.from_folder(folder)
        check_template(renderer)
        return TokenPolicy(tokens, renderer, sampling=sampling, model=folder.name), tokens.aclose
    await tokens.aclose()
    log.warning("%s names no model folder that is here: rollouts will have no tokens (give --model)", model_url)
    spec = ModelSpec(
        base_url=model_url,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_new_tokens,
    )
    client = ChatClient(spec, replies=replies, concurrency=concurrency)
    await client.check()
    return ChatPolicy(client, max_tokens=sampling.max_new_tokens), client.aclose


async def served_identity(model_url: str) -> str:
    """Which policy answers there, so that no run goes on with another: the hash of its weights where they are on this
    machine, else its name and weight version. ServerError if nobody answers."""
    tokens = HttpTokenClient(model_url)
    try:
        info = await _model_info(tokens)
    finally:
        await tokens.aclose()
    if (folder := _local_model(info)) is not None:
        return model_fingerprint(folder)
    if info.get("model_path"):
        return f"{info['model_path']} {info.get('weight_version')}"
    client = ChatClient(ModelSpec(base_url=model_url))
    try:
        return await client.check()
    finally:
        await client.aclose()


async def _model_info(tokens: HttpTokenClient) -> dict[str, Any]:
    """What the server says of itself; nothing if it is a chat server without SGLang's endpoints."""
    try:
        info = await tokens.model_info()
    except ModelFailure as failure:
        if failure.kind in ("unreachable", "timeout"):
            raise ServerError(
                f"no model server answers at {tokens.base_url}", "start it, or give its address with --model-url"
            ) from None
        return {}
    return info if isinstance(info, dict) else {}


def _local_model(info: dict[str, Any]) -> Path | None:
    """The folder that the server says it serves, if it has a tokenizer and is on this machine."""
    path = Path(str(info.get("model_path") or ""))
    return path if (path / "tokenizer.json").is_file() else None
