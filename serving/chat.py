"""The chat client: every role reaches its model through this, over `/v1/chat/completions`.

One request is: look in the reply store by the hash of the whole request; else wait for one of the client's slots, then
try under one deadline that covers all attempts and the pauses between them. Failures are typed; those that a second
try may mend (no connection, 408, 409, 429, 5xx, an unreadable reply) are tried again a bounded number of times with
seeded jitter, or after `Retry-After`. What remains is a `ModelFailure`: infra, never the fault of what was asked.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ValidationError

from astrolabe.records.base import Usage
from astrolabe.records.errors import ServerError, UsageError
from astrolabe.records.ids import content_hash, rng_for
from astrolabe.records.messages import FunctionCall, Message, ToolCall, ToolSchema
from serving.health import Health
from serving.http import is_loopback

FailureKind = Literal["timeout", "unreachable", "rate_limit", "server_error", "bad_request", "bad_reply"]
RETRIED: frozenset[str] = frozenset({"unreachable", "rate_limit", "server_error", "bad_reply"})
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 20.0


class ModelFailure(Exception):
    """A model server did not give a usable reply, after the retries. Infra: the policy did not cause it."""

    def __init__(self, kind: FailureKind, message: str, *, attempts: int = 1) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind: FailureKind = kind
        self.message = message
        self.attempts = attempts


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which server and model, and how to sample. The key stays in the environment variable that `api_key_env` names."""

    base_url: str
    """With or without the `/v1` at its end."""
    model: str = "default"
    temperature: float = 0.7
    top_p: float = 1.0
    max_tokens: int = 2048
    timeout_s: float = 120
    """One deadline for a request, all its attempts and pauses; waiting for a slot is not counted."""
    api_key_env: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Further members of the request body, e.g. `{"chat_template_kwargs": {"enable_thinking": false}}`."""


@dataclass(frozen=True)
class ChatReply:
    content: str
    reasoning_content: str | None
    tool_calls: list[ToolCall]
    finish_reason: str
    usage: Usage
    model: str
    key: str
    """Hash of the request, under which the reply is stored."""


class ReplyStoreLike(Protocol):
    def get(self, key: str) -> dict[str, Any] | None: ...
    def put(self, key: str, reply: dict[str, Any]) -> None: ...


class ChatClient:
    """An asynchronous client of one model on one server. `usage` sums all replies, stored ones included.

    May be used from one event loop after another (the connection pool is made anew), not from two at once.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        replies: ReplyStoreLike | None = None,
        concurrency: int = 32,
        max_retries: int = 4,
        seed: int = 0,
    ) -> None:
        if concurrency < 1 or max_retries < 0:
            raise UsageError(
                f"concurrency {concurrency}, max_retries {max_retries}", "at least 1 and at least 0 are needed"
            )
        self.spec = spec
        self.usage = Usage()
        self.usage_by_role: dict[str, Usage] = {}
        self.retries = 0
        self.replayed = 0
        self._replies = replies
        self._health = Health(spec.base_url)
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._seed = seed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore | None = None
        self._asking: dict[str, asyncio.Lock] = {}
        self._openai: Any = None

    async def complete(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        role: str,
        seed: int,
        tools: Sequence[ToolSchema | Mapping[str, Any]] | None = None,
        response_format: dict[str, Any] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> ChatReply:
        """One assistant turn. `role` names the agent, for the accounting only. ModelFailure after the retries."""
        body = self._body(messages, seed, tools, response_format, temperature, max_tokens)
        key = content_hash(body)
        reply = await (self._ask(body, key) if self._replies is None else self._ask_once(self._replies, body, key))
        self.usage += reply.usage
        self.usage_by_role[role] = self.usage_by_role.get(role, Usage()) + reply.usage
        return reply

    async def check(self) -> str:
        """The name of the model that the server offers (preflight). ServerError with the mend if it does not answer."""
        import httpx
        import openai

        self._enter_loop()
        try:
            async with asyncio.timeout(min(self.spec.timeout_s, 15.0)):
                reply = await self._client().get("/models", cast_to=httpx.Response)
            names = [str(model["id"]) for model in json.loads(reply.content)["data"] or []]
        except (openai.APIConnectionError, TimeoutError):
            raise ServerError(
                f"no model server answers at {self.spec.base_url}", "start it, or give its address with --model-url"
            ) from None
        except (openai.AuthenticationError, openai.PermissionDeniedError):
            raise self._refused_key() from None
        except openai.APIError as error:
            raise ServerError(
                f"{self.spec.base_url}/models failed: {error}", "is this an OpenAI-compatible server?"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ServerError(
                f"{self.spec.base_url}/models gives no list of models", "is this an OpenAI-compatible server?"
            ) from None
        if self.spec.model in names or not names:
            return self.spec.model
        if self.spec.model == "default":
            return names[0]
        raise ServerError(
            f"{self.spec.base_url} offers {', '.join(names)}, not {self.spec.model!r}", "give one of these with --model"
        )

    async def aclose(self) -> None:
        """Close the connection pool; the client may be used again."""
        client, self._openai = self._openai, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()

    # -- the request ------------------------------------------------------------------------------------------------

    def _body(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        seed: int,
        tools: Sequence[ToolSchema | Mapping[str, Any]] | None,
        response_format: dict[str, Any] | None,
        temperature: float | None,
        max_tokens: int | None,
    ) -> dict[str, Any]:
        """The request as sent, and as hashed. The address is left out: a replay may have the server elsewhere."""
        body: dict[str, Any] = {
            "model": self.spec.model,
            "messages": [_plain(message) for message in messages],
            "temperature": self.spec.temperature if temperature is None else temperature,
            "top_p": self.spec.top_p,
            "max_tokens": self.spec.max_tokens if max_tokens is None else max_tokens,
            "seed": seed,
        }
        if tools:
            body["tools"] = [_plain(tool) for tool in tools]
        if response_format is not None:
            body["response_format"] = response_format
        return body | self.spec.extra

    async def _ask_once(self, replies: ReplyStoreLike, body: dict[str, Any], key: str) -> ChatReply:
        """The stored reply, else a new one, stored. Equal requests in flight share one reply, as they will in a replay."""
        self._enter_loop()
        async with self._asking.setdefault(key, asyncio.Lock()):
            stored = replies.get(key)
            if stored is not None:
                self.replayed += 1
                return _reply_from_store(stored, key)
            reply = await self._ask(body, key)
            replies.put(key, _reply_to_store(reply))
            self._asking.pop(key, None)  # who comes now finds the stored reply
            return reply

    async def _ask(self, body: dict[str, Any], key: str) -> ChatReply:
        loop, slots = self._enter_loop()
        async with slots:
            deadline = loop.time() + self.spec.timeout_s
            attempt = 0
            while True:
                attempt += 1
                remaining = deadline - loop.time()
                try:
                    reply = await self._attempt(body, key, remaining)
                    self._health.good()
                    return reply
                except _AttemptFailed as failed:
                    pause = self._pause(key, attempt, failed)
                    spent = failed.kind not in RETRIED or attempt > self._max_retries
                    if spent or loop.time() + pause >= deadline:
                        self._health.failed(failed.kind, failed.message)
                        raise ModelFailure(failed.kind, failed.message, attempts=attempt) from failed.__cause__
                self.retries += 1
                await asyncio.sleep(pause)

    async def _attempt(self, body: dict[str, Any], key: str, remaining: float) -> ChatReply:
        import httpx
        import openai

        try:
            async with asyncio.timeout(remaining):
                # Not `chat.completions.create`: it walks body and tools by type, several times the cost of the request.
                raw = await self._client().post("/chat/completions", body=body, cast_to=httpx.Response)
                payload = json.loads(raw.content)
                if b"\\u" in raw.content:  # a lone surrogate could be stored nowhere
                    json.dumps(payload, ensure_ascii=False).encode()
        except (TimeoutError, openai.APITimeoutError) as error:
            raise _AttemptFailed("timeout", f"no reply in {self.spec.timeout_s:g} s") from error
        except openai.APIConnectionError as error:
            raise _AttemptFailed("unreachable", f"{self.spec.base_url}: {error.__cause__ or error}") from error
        except (openai.AuthenticationError, openai.PermissionDeniedError):
            raise self._refused_key() from None
        except openai.APIStatusError as error:
            if error.status_code == 507:  # its disk is full: so it will be for every request
                raise ServerError(
                    f"{self.spec.base_url} has no room: {_short(error.message)}",
                    "make room there; the same command goes on",
                ) from None
            kind, after = _classify(error.status_code), _retry_after(error.response.headers)
            raise _AttemptFailed(kind, f"HTTP {error.status_code}: {_short(error.message)}", after) from error
        except (ValueError, openai.APIError) as error:
            raise _AttemptFailed("bad_reply", f"the reply is not JSON: {_short(str(error))}") from error
        return _reply_from_wire(payload, key)

    def _refused_key(self) -> ServerError:
        name = self.spec.api_key_env
        return ServerError(
            f"{self.spec.base_url} refused the key",
            f"set {name} to a valid key" if name else "name the variable that holds the key (api_key_env)",
        )

    def _pause(self, key: str, attempt: int, failed: _AttemptFailed) -> float:
        """Seconds before the next attempt: what the server asks for, else doubling with seeded jitter."""
        if failed.retry_after is not None:
            return failed.retry_after
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
        return longest * (0.5 + 0.5 * rng_for(self._seed, key, "retry", attempt).random())

    def _enter_loop(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop or self._slots is None:  # connections and locks belong to the loop that made them
            self._loop, self._openai, self._slots = loop, None, asyncio.Semaphore(self._concurrency)
            self._asking = {}
        return loop, self._slots

    def _client(self) -> Any:
        if self._openai is None:
            import openai

            base = self.spec.base_url.rstrip("/")
            base = base if base.endswith("/v1") else base + "/v1"
            self._openai = openai.AsyncOpenAI(
                base_url=base,
                api_key=_api_key(self.spec.api_key_env),
                max_retries=0,
                timeout=self.spec.timeout_s,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=not is_loopback(base)),
            )
        return self._openai


def json_schema_format(model: type[BaseModel]) -> dict[str, Any]:
    """`response_format` that asks for a JSON object which validates as `model`."""
    return {"type": "json_schema", "json_schema": {"name": model.__name__, "schema": model.model_json_schema()}}


class _AttemptFailed(Exception):
    def __init__(self, kind: FailureKind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.retry_after = retry_after


def _plain(value: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else dict(value)


def _api_key(variable: str | None) -> str:
    if variable is None:
        return "none"  # the SDK wants one; servers of one's own ask for none
    key = os.environ.get(variable)
    if not key:
        raise UsageError(f"the environment variable {variable} is not set", f"export {variable}=...")
    return key


def _classify(status: int) -> FailureKind:
    if status == 429:
        return "rate_limit"
    return "server_error" if status >= 500 or status in (408, 409) else "bad_request"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks us to wait: a number or an HTTP date; None where absent or unreadable."""
    text = headers.get("retry-after")
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _reply_from_wire(payload: Any, key: str) -> ChatReply:
    """The reply of a server, checked: what is not OpenAI's form is a bad reply, never silently empty."""
    try:
        choice = payload["choices"][0]
        message = choice["message"]
        calls = [
            ToolCall(
                id=call.get("id") or f"call_{index}",
                function=FunctionCall(name=call["function"]["name"], arguments=call["function"]["arguments"]),
            )
            for index, call in enumerate(message.get("tool_calls") or [], 1)
        ]
        usage = payload.get("usage") or {}
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise TypeError("content is no string")
        return ChatReply(
            content=content or "",
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls,
            finish_reason=choice.get("finish_reason") or "stop",
            usage=Usage(
                prompt_tokens=usage.get("prompt_tokens") or 0,
                completion_tokens=usage.get("completion_tokens") or 0,
                calls=1,
            ),
            model=str(payload.get("model") or ""),
            key=key,
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValidationError) as error:
        raise _AttemptFailed(
            "bad_reply", f"not a chat completion: {type(error).__name__} {_short(str(error))}"
        ) from error


def _reply_to_store(reply: ChatReply) -> dict[str, Any]:
    return {
        "content": reply.content,
        "reasoning_content": reply.reasoning_content,
        "tool_calls": [call.model_dump(mode="json") for call in reply.tool_calls],
        "finish_reason": reply.finish_reason,
        "usage": reply.usage.to_json(),
        "model": reply.model,
    }


def _reply_from_store(row: Mapping[str, Any], key: str) -> ChatReply:
    return ChatReply(
        content=row["content"],
        reasoning_content=row["reasoning_content"],
        tool_calls=[ToolCall.model_validate(call) for call in row["tool_calls"]],
        finish_reason=row["finish_reason"],
        usage=Usage.model_validate(row["usage"]),
        model=row["model"],
        key=key,
    )
