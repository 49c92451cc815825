"""What a synthesis verb holds open: the run store, one chat client per role, and the offline teacher where no server
was named.

The teacher is a real HTTP server on loopback, in a thread of this process. With `--replay` there is no server at all:
every request must be answered by the replayed run's stored replies.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agents.context import Context
from astrolabe.records.errors import UsageError
from astrolabe.records.run_store import RunStore, read_run
from graphs.options import RoleModel, SynthOptions, check_judge, self_judged
from serving.chat import ChatClient, ModelSpec
from serving.http import launch_in_thread

TEACHER = "astrolabe-teacher"
NO_SERVER = "http://127.0.0.1:9"
"""The discard port: with a replay nothing is ever sent."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """An open synthesis run."""

    options: SynthOptions
    """With the models' names resolved: `model` is never "default"."""
    store: RunStore
    context: Context
    """One client per role in `clients`; all of them share the run's reply store."""

    @property
    def models(self) -> dict[str, str]:
        """role -> model name, `default` included: for the provenance of records."""
        return {role: client.spec.model for role, client in self.context.clients.items()}


def file_hash(path: Path) -> str:
    """SHA-256 of an input file, for `inputs` of the run. UsageError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "give the path of an existing JSONL file") from None


def _spec(options: SynthOptions, role: RoleModel, url: str) -> ModelSpec:
    def pick(name: str) -> Any:
        own = getattr(role, name)
        return getattr(options, name) if own is None else own

    return ModelSpec(
        base_url=role.model_url or url,
        model=pick("model"),
        temperature=pick("temperature"),
        top_p=pick("top_p"),
        max_tokens=pick("max_tokens"),
        timeout_s=pick("timeout_s"),
        api_key_env=pick("api_key_env"),
    )


async def _resolve(specs: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """The specs with the model that each server offers. ServerError if one does not answer."""
    resolved: dict[str, ModelSpec] = {}
    for role, spec in specs.items():
        client = ChatClient(spec)
        try:
            resolved[role] = replace(spec, model=await client.check())
        finally:
            await client.aclose()
    return resolved


def _as_recorded(options: SynthOptions) -> SynthOptions:
    """For a replay: the models of the recorded run, since a request's hash holds its model's name."""
    assert options.replay is not None
    config = read_run(options.replay)["config"]
    recorded = {role: spec.get("model") for role, spec in config.get("roles", {}).items()}
    return replace(
        options,
        model=config.get("model", options.model) if options.model == "default" else options.model,
        roles={role: replace(spec, model=spec.model or recorded.get(role)) for role, spec in options.roles.items()},
    )


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Appends our log records to `path`; keys and headers are never logged by the clients."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("agents", "astrolabe", "graphs", "serving"):
        logging.getLogger(name).setLevel(logging.INFO)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


@contextmanager
def open_session(
    verb: str,
    out: Path,
    options: SynthOptions,
    *,
    inputs: dict[str, str],
    prompts: dict[str, str],
    files: Sequence[str],
) -> Iterator[Session]:
    """Opens (or continues) the run at `out` and connects its models; not from inside an event loop.

    inputs: name -> hash of an input file; prompts: agent -> hash; files: stems of the row files.
    ServerError if a server does not answer and UsageError if the judge would judge its own generations (no folder is made
    then), RunError if the folder holds another run.
    """
    with ExitStack() as stack:
        taught = options.model_url is None and options.replay is None
        if options.replay is not None:
            options, url = _as_recorded(options), NO_SERVER
        elif options.model_url is not None:
            url = options.model_url
        else:
            from agents.teacher.server import create_app

            options = replace(options, model=TEACHER)
            app = create_app(seed=options.seed, defect_rate=options.defect_rate, labels_path=options.labels)
            url = stack.enter_context(launch_in_thread(app, name="teacher")).url
        specs = {"default": _spec(options, RoleModel(), url)}
        specs |= {role: _spec(options, own, url) for role, own in options.roles.items()}
        if options.replay is None:
            specs = asyncio.run(_resolve(specs))
        options = replace(
            options,
            model=specs["default"].model,
            roles={role: replace(own, model=specs[role].model) for role, own in options.roles.items()},
        )
        if options.replay is None:
            check_judge(options)
        config = options.recorded() | {"self_judged": self_judged(options) and options.model != TEACHER}
        store = stack.enter_context(
            RunStore.open(
                out,
                verb=verb,
                config=config,
                seed=options.seed,
                prompts=prompts,
                inputs=inputs,
                files=files,
                replay_from=options.replay,
            )
        )
        stack.enter_context(_log_to(out / "logs" / "run.log"))
        log.info(
            "%s, models: %s%s",
            verb,
            {r: s.model for r, s in specs.items()},
            "" if taught else f" at {urlsplit(url).hostname}",
        )
        clients = {
            role: ChatClient(spec, replies=store.replies, concurrency=options.concurrency, seed=options.seed)
            for role, spec in specs.items()
        }
        yield Session(options, store, Context(clients=clients, seed=options.seed))
