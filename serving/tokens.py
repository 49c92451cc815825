"""The token client: SGLang's `/generate` with ids in, and ids with their log-probs out.

The policy is trained on exactly the ids and log-probs that come back here, so a reply that lacks them, or whose ids and
log-probs differ in number, is refused. So is a truncated distribution (top-p below 1, a top-k): its log-probs are not
those of the distribution that was sampled, and training on them has a ratio that is off before any update.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from astrolabe.records.errors import ServerError, UsageError
from astrolabe.records.ids import rng_for
from serving.chat import FailureKind, ModelFailure
from serving.health import Health
from serving.http import is_loopback

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy; log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Equal seeds and prompts give equal tokens, whatever else the server is doing."""
    json_schema: str | None = None

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


@dataclass(frozen=True)
class Generation:
    output_ids: list[int]
    """With the stop token that was sampled; none after `length` or `abort`."""
    logprobs: list[float]
    """After temperature, one per output id."""
    finish_reason: Literal["stop", "length", "abort"]
    prompt_tokens: int
    cached_tokens: int
    weight_version: int
    versions: tuple[int, ...] = ()
    """Weight version per output id where the server tells it; else empty, and `weight_version` is the last one's."""


class TokenClient(Protocol):
    async def generate(self, input_ids: list[int], sampling: Sampling, *, rid: str | None = None) -> Generation: ...
    async def abort(self, rid: str | None = None) -> None: ...
    async def pause(self, mode: PauseMode = "retract") -> None: ...
    async def continue_(self) -> None: ...
    async def flush_cache(self) -> None: ...
    async def update_weights_from_disk(self, path: str, version: int) -> None: ...
    async def aclose(self) -> None: ...


def check_sampling(sampling: Sampling, *, allow_truncated: bool) -> None:
    """UsageError where the log-probs of `sampling` would not be those of what it samples from."""
    if sampling.truncated and not allow_truncated:
        raise UsageError(
            f"top_p {sampling.top_p:g}, top_k {sampling.top_k}: log-probs of a truncated distribution cannot be trained on",
            "use top_p 1 and top_k -1, or a client with allow_truncated=True where nothing is trained on the tokens",
        )
    if sampling.max_new_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise UsageError(
            f"sampling out of range: max_new_tokens {sampling.max_new_tokens}, temperature {sampling.temperature:g}, "
            f"top_p {sampling.top_p:g}",
            "max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1",
        )


class HttpTokenClient:
    """A client of a server that speaks SGLang's wire form (SGLang, SGLang-JAX, the embedded engine).

    `timeout_s` is one deadline for a generation and its retries. A generation with a seed may be tried again when the
    connection fails or the server answers 5xx or 429; without a seed it may too, as its reply was never seen.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 600.0,
        concurrency: int = 256,
        max_retries: int = 3,
        allow_truncated: bool = False,
        seed: int = 0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._health = Health(self.base_url)
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._allow_truncated = allow_truncated
        self._seed = seed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: Any = None
        self._slots: asyncio.Semaphore | None = None

    async def generate(self, input_ids: list[int], sampling: Sampling, *, rid: str | None = None) -> Generation:
        """Sample after `input_ids`. ModelFailure if the server fails or its reply cannot be trained on."""
        check_sampling(sampling, allow_truncated=self._allow_truncated)
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": sampling_params(sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "stream": False,
        }
        if rid is not None:
            body["rid"] = rid
        _, slots = self._enter_loop()
        async with slots:
            try:
                generation = generation_from_wire(await self._post("/generate", body, retry=True))
            except ModelFailure as failure:
                self._health.failed(failure.kind, failure.message)
                raise
        self._health.good()
        return generation

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all of them (`rid` None); each returns with finish reason `abort`."""
        await self._post("/abort_request", {"rid": rid} if rid is not None else {"abort_all": True})

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. `retract` keeps requests and computes their cache again under the next weights."""
        await self._post("/pause_generation", {"mode": mode})

    async def continue_(self) -> None:
        await self._post("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop reusable prefixes. ModelFailure (bad_request) where the server refuses because requests run."""
        await self._post("/flush_cache", {})

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load the weights in folder `path`, which the server must see. Call between `pause` and `continue_`."""
        reply = await self._post(
            "/update_weights_from_disk",
            {"model_path": path, "weight_version": str(version), "flush_cache": True, "abort_all_requests": False},
        )
        if not isinstance(reply, dict) or not reply.get("success"):
            raise ModelFailure("server_error", f"weights were not updated: {reply!r:.300}")

    async def check(self) -> None:
        """Preflight: ServerError with the mend if no server that can take weights answers."""
        try:
            async with asyncio.timeout(min(self._timeout_s, 15.0)):
                info = await self.model_info()
        except (ModelFailure, TimeoutError) as error:
            if getattr(error, "kind", "timeout") in ("unreachable", "timeout"):
                raise ServerError(
                    f"no model server answers at {self.base_url}", "start it, or give its address"
                ) from None
            info = None
        if not isinstance(info, dict):
            raise ServerError(f"{self.base_url} does not say which model it serves", "is this an SGLang server?")

    async def model_info(self) -> dict[str, Any]:
        """The server's `/get_model_info`."""
        return await self._post("/get_model_info", None, retry=True)

    async def aclose(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    def _enter_loop(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Semaphore]:
        import httpx

        loop = asyncio.get_running_loop()
        if loop is not self._loop or self._http is None or self._slots is None:
            self._loop, self._slots = loop, asyncio.Semaphore(self._concurrency)
            self._http = httpx.AsyncClient(
                base_url=self.base_url,
                timeout=self._timeout_s,
                trust_env=not is_loopback(self.base_url),
                limits=httpx.Limits(max_connections=self._concurrency + 8, max_keepalive_connections=self._concurrency),
            )
        return loop, self._slots

    async def _post(self, path: str, body: dict[str, Any] | None, *, retry: bool = False) -> Any:
        """POST `body` (GET where it is None) and return the JSON of the reply, or its text where it is none."""
        loop, _ = self._enter_loop()
        deadline = loop.time() + self._timeout_s
        attempt = 0
        while True:
            attempt += 1
            kind, message = await self._attempt(path, body, deadline - loop.time())
            if kind is None:
                return message
            pause = min(8.0, 0.2 * 2**attempt) * (0.5 + 0.5 * rng_for(self._seed, path, attempt).random())
            again = retry and kind in ("unreachable", "rate_limit", "server_error") and attempt <= self._max_retries
            if not again or loop.time() + pause >= deadline:
                raise ModelFailure(kind, message, attempts=attempt)
            await asyncio.sleep(pause)

    async def _attempt(
        self, path: str, body: dict[str, Any] | None, remaining: float
    ) -> tuple[FailureKind | None, Any]:
        import httpx

        try:
            async with asyncio.timeout(remaining):
                reply = await (self._http.get(path) if body is None else self._http.post(path, json=body))
        except (TimeoutError, httpx.TimeoutException):
            return "timeout", f"{self.base_url}{path}: no reply in {self._timeout_s:g} s"
        except httpx.HTTPError as error:
            return "unreachable", f"{self.base_url}{path}: {error}"
        if reply.status_code == 429:
            return "rate_limit", f"{path}: HTTP 429"
        if reply.status_code >= 400:
            kind: FailureKind = "server_error" if reply.status_code >= 500 else "bad_request"
            return kind, f"{path}: HTTP {reply.status_code}: {reply.text[:300]}"
        if "json" not in reply.headers.get("content-type", ""):
            return None, reply.text
        try:
            return None, reply.json()
        except ValueError:
            return "bad_reply", f"{path}: the reply is not JSON"


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """`sampling` in SGLang's names. The stop token is kept in the output: it was sampled, so it is trained."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.json_schema is not None:
        params["json_schema"] = sampling.json_schema
    return params


def generation_from_wire(reply: Any) -> Generation:
    """One reply of `/generate`, checked. ModelFailure (bad_reply) where ids or log-probs are missing or disagree."""
    try:
        meta = reply["meta_info"]
        ids = [int(token) for token in reply["output_ids"]]
        finish = (meta.get("finish_reason") or {}).get("type")
        rows = meta.get("output_token_logprobs")
        if finish not in ("stop", "length", "abort"):
            raise ModelFailure("bad_reply", f"finish reason {finish!r}")
        if rows is None and ids:
            raise ModelFailure("bad_reply", "the server sent no log-probs: they cannot be trained on")
        rows = rows or []
        if len(rows) != len(ids):
            raise ModelFailure("bad_reply", f"{len(ids)} output ids but {len(rows)} log-probs")
        if [int(row[1]) for row in rows] != ids:
            raise ModelFailure("bad_reply", "the log-probs are of other ids than the output")
        logprobs = [float(row[0]) for row in rows]
        if not all(math.isfinite(value) and value <= 1e-4 for value in logprobs):
            raise ModelFailure("bad_reply", "a log-prob is not finite or above 0")
        version = _version(meta.get("weight_version"))
        versions = meta.get("output_token_weight_versions") or ()
        return Generation(
            output_ids=ids,
            logprobs=logprobs,
            finish_reason=finish,
            prompt_tokens=int(meta.get("prompt_tokens") or 0),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            weight_version=version,
            versions=tuple(int(value) for value in versions),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelFailure("bad_reply", f"not a /generate reply: {type(error).__name__}: {error}") from error


def _version(value: Any) -> int:
    """SGLang's weight version is text; a server that was never updated says `default`, which is version 0."""
    return int(value) if value not in (None, "", "default") else 0
