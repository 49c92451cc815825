"""An agent: one role of a model as a small compiled graph, ask -> validate -> repair -> quarantine.

The prompt is a Jinja file per language that ends with the request as one fenced JSON block; nothing else of the request
reaches the template, and no text inside the block can close it (every backtick in it is a JSON escape). The reply is
asked for with `response_format` (the JSON schema of the reply model) and validated strictly: `"false"` is no boolean
and `"quite good"` no member of an enum. A reply that does not validate is shown its error and asked for again, a
bounded number of times; then the item is quarantined with a reason. There is no default reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import jinja2
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import TypedDict

from agents.context import Context
from astrolabe.records.base import Usage
from astrolabe.records.errors import ServerError
from astrolabe.records.ids import content_hash, seed_for
from astrolabe.records.messages import Message
from serving.chat import ModelFailure

PROMPTS = Path(__file__).parent / "prompts"
LANGUAGES = ("en", "zh")
_THINK = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_FENCED = re.compile(r"\A\s*```(?:json)?\s*\n(.*)\n\s*```\s*\Z", re.DOTALL)


class Strict(BaseModel):
    """Base of every reply: no unknown fields, no coercion (`"true"`, 1 and "yes" are not booleans)."""

    model_config = ConfigDict(extra="forbid", strict=True)


Req = TypeVar("Req", bound=BaseModel)
Rep = TypeVar("Rep", bound=BaseModel)


class AgentInput(TypedDict, total=False):
    """One call. Only `request` is needed to try an agent alone."""

    request: dict[str, Any]
    seed: int
    item: str


class AgentState(AgentInput, total=False):
    """State of one call."""

    messages: list[dict[str, Any]]
    attempts: int
    text: str
    reply: dict[str, Any] | None
    error: str | None
    failure: str | None
    usage: dict[str, int]
    model: str


@dataclass(frozen=True)
class AgentResult(Generic[Rep]):
    """What became of one call: a validated reply, or None and the reason of the quarantine."""

    reply: Rep | None
    failure: str | None
    """`invalid_reply` or `model_<kind>` (timeout, rate_limit, server_error, bad_request, bad_reply); None if replied."""
    detail: str
    attempts: int
    usage: Usage
    model: str


@cache
def prompt_environment() -> jinja2.Environment:
    """Templates from `agents/prompts`; an undefined name is an error, never an empty string."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(PROMPTS), undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True
    )


def request_block(agent: str, request: Any) -> str:
    """The fenced JSON block that ends a prompt. Newlines and backticks of the request are JSON escapes, so the text of a
    request can neither end the block nor begin another."""
    body = json.dumps({"agent": agent, "request": request}, ensure_ascii=False, allow_nan=False)
    return "```json\n" + body.replace("`", "\\u0060") + "\n```"


def parse_reply(text: str, reply: type[Rep]) -> Rep:
    """The reply in a model's text: an optional think block and one optional fence are taken off, then JSON is validated
    strictly. Raises ValidationError."""
    bare = _THINK.sub("", text, count=1)
    fenced = _FENCED.match(bare)
    return reply.model_validate_json((fenced.group(1) if fenced else bare).strip(), strict=True)


def _explain(error: ValidationError) -> str:
    faults = [f"{'.'.join(map(str, e['loc'])) or 'reply'}: {e['msg']}" for e in error.errors()[:5]]
    return "; ".join(faults)[:1000]


class Agent(Generic[Req, Rep]):
    """One role: request and reply models, a prompt per language, and the compiled graph."""

    def __init__(
        self,
        name: str,
        *,
        request: type[Req],
        reply: type[Rep],
        prompt: str | None = None,
        role: str | None = None,
        params: Mapping[str, Any] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`name` is what the JSON block and the teacher call it; `prompt` the stem of its templates (default: the name);
        `role` picks the client (default: the name up to the first dot); `params` are constants for the template."""
        self.name, self.request, self.reply = name, request, reply
        self.prompt = prompt or name
        self.role = role or name.split(".")[0]
        self.params = dict(params or {})
        self.temperature, self.max_tokens = temperature, max_tokens
        self.schema = reply.model_json_schema()
        sources = {lang: (PROMPTS / f"{self.prompt}.{lang}.j2").read_text(encoding="utf-8") for lang in LANGUAGES}
        self.prompt_hash = content_hash([sources, self.params, self.schema])
        self.graph = self.build()

    def render(self, request: Req | dict[str, Any], language: str) -> str:
        """The prompt; it ends with the JSON block."""
        body = request.model_dump(mode="json") if isinstance(request, BaseModel) else request
        template = prompt_environment().get_template(f"{self.prompt}.{language}.j2")
        schema = json.dumps(self.schema, ensure_ascii=False, sort_keys=True)
        text = template.render(schema=schema, block=request_block(self.name, body), **self.params).rstrip()
        if not text.endswith("\n```"):
            raise ValueError(f"prompts/{self.prompt}.{language}.j2 must end with {{{{ block }}}}")
        return text

    def build(self, context_schema: type[Context] = Context) -> Any:
        """The compiled graph over `AgentState`; Studio asks for one with a context of its own."""
        builder = StateGraph(AgentState, context_schema=context_schema, input_schema=AgentInput)
        builder.add_node("ask", self._ask)
        builder.add_node("validate", self._validate)
        builder.add_node("repair", self._repair)
        builder.add_node("quarantine", self._quarantine)
        builder.add_edge(START, "ask")
        builder.add_edge("ask", "validate")
        builder.add_conditional_edges(
            "validate", self._route, {"done": END, "repair": "repair", "quarantine": "quarantine"}
        )
        builder.add_edge("repair", "ask")
        builder.add_edge("quarantine", END)
        return builder.compile(name=self.name)

    async def __call__(self, request: Req, ctx: Context, *, seed: int, item: str = "") -> AgentResult[Rep]:
        """Ask once, with repairs. Raises ServerError if the server cannot be reached; every other failure is a result."""
        state: AgentInput = {"request": request.model_dump(mode="json"), "seed": seed, "item": item}
        out = await self.graph.ainvoke(state, context=ctx)
        reply = None if out.get("reply") is None else parse_reply(out["text"], self.reply)
        return AgentResult(
            reply=reply,
            failure=out.get("failure"),
            detail=out.get("error") or "",
            attempts=out.get("attempts", 0),
            usage=Usage(**out.get("usage", {})),
            model=out.get("model", ""),
        )

    async def _ask(self, state: AgentState, runtime: Runtime[Context]) -> AgentState:
        ctx = runtime.context
        attempt = state.get("attempts", 0)
        messages = state.get("messages")
        if messages is None:
            request = self.request.model_validate(state["request"])
            language = getattr(request, "language", None) or ctx.language
            messages = [{"role": "user", "content": self.render(request, language if language in LANGUAGES else "en")}]
        seed = state.get("seed", ctx.seed)
        try:
            answer = await ctx.client(self.role).complete(
                [Message.model_validate(m) for m in messages],
                role=self.role,
                seed=seed_for(seed, self.name, state.get("item", ""), attempt),
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": re.sub(r"\W", "_", self.name), "schema": self.schema, "strict": True},
                },
                temperature=self.temperature,
                max_tokens=self.max_tokens,
            )
        except ModelFailure as failure:
            if failure.kind == "unreachable":
                raise ServerError(f"the model server of role {self.role!r} cannot be reached: {failure}") from failure
            return {
                "messages": messages,
                "attempts": attempt + 1,
                "failure": f"model_{failure.kind}",
                "error": str(failure)[:1000],
            }
        usage = Usage(**state.get("usage", {})) + answer.usage
        return {
            "messages": messages,
            "attempts": attempt + 1,
            "text": answer.content,
            "model": answer.model,
            "usage": usage.model_dump(),
        }

    async def _validate(self, state: AgentState) -> AgentState:
        if state.get("failure"):
            return {"reply": None}
        try:
            return {"reply": parse_reply(state["text"], self.reply).model_dump(mode="json"), "error": None}
        except ValidationError as error:
            return {"reply": None, "error": _explain(error)}

    def _route(self, state: AgentState, runtime: Runtime[Context]) -> Literal["done", "repair", "quarantine"]:
        if state.get("reply") is not None:
            return "done"
        if state.get("failure") or state["attempts"] > runtime.context.max_repairs:
            return "quarantine"
        return "repair"

    async def _repair(self, state: AgentState, runtime: Runtime[Context]) -> AgentState:
        """The wrong reply stays in the talk; the block is given again, since it must end the last message."""
        request = self.request.model_validate(state["request"])
        language = getattr(request, "language", None) or runtime.context.language
        template = prompt_environment().get_template(f"repair.{language if language in LANGUAGES else 'en'}.j2")
        block = request_block(self.name, request.model_dump(mode="json"))
        text = template.render(error=json.dumps(state["error"], ensure_ascii=False).replace("`", "'"), block=block)
        wrong = {"role": "assistant", "content": state["text"][:4000]}
        return {"messages": [*state["messages"], wrong, {"role": "user", "content": text.rstrip()}]}

    async def _quarantine(self, state: AgentState) -> AgentState:
        return {"reply": None, "failure": state.get("failure") or "invalid_reply"}
