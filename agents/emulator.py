"""The emulator: plays a server's tool from its document, with an explicit state and the history of the episode.

The state is the emulator's own memory: it comes with every call and goes back with every reply, so that what was created
can be listed, what was deleted is gone, and nothing is remembered between episodes.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agents.base import Agent, Strict
from agents.context import Context
from astrolabe.envs.emulator import EmulatorAnswer, EmulatorBackend, EmulatorCall
from astrolabe.records.card import ServerCard
from astrolabe.records.ids import seed_for
from astrolabe.records.messages import FunctionSchema


class EmulateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    language: Literal["en", "zh"] = "en"
    server: str
    description: str = ""
    tools: list[FunctionSchema]
    """All tools of the server: what one returns, another may need."""
    tool: str
    arguments: dict[str, Any]
    state: dict[str, Any] = Field(default_factory=dict)
    history: list[dict[str, Any]] = Field(default_factory=list)


class EmulateReply(Strict):
    status: Literal["ok", "error"]
    value: Any = None
    """What the tool returns; null with an error."""
    error: str | None = None
    """What the tool says where it refuses; null without an error."""
    state: dict[str, Any]
    """The whole state after the call."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.status == "error" and (not self.error or self.value is not None):
            raise ValueError("status `error` needs an error text and no value")
        if self.status == "ok" and self.error is not None:
            raise ValueError("status `ok` has no error text")
        return self


emulate = Agent("emulator", request=EmulateRequest, reply=EmulateReply)
graph = emulate.graph


def open_emulator(card: ServerCard, ctx: Context, *, seed: int, item: str = "") -> EmulatorBackend:
    """A back end for one episode with the card's server."""

    async def ask(call: EmulatorCall) -> EmulatorAnswer:
        request = EmulateRequest(
            language=card.language,
            server=card.name,
            description=card.description,
            tools=card.tools,
            tool=call.tool.name,
            arguments=call.arguments,
            state=call.state,
            history=call.history,
        )
        result = await emulate(request, ctx, seed=seed_for(seed, call.index, call.attempt), item=item)
        if result.reply is None:
            why = f"{result.failure}: {result.detail}"
            return EmulatorAnswer(status=None, error=why, usage=result.usage, model=result.model)
        reply = result.reply
        return EmulatorAnswer(
            status=reply.status,
            value=reply.value,
            error=reply.error,
            state=reply.state,
            usage=result.usage,
            model=result.model,
        )

    return EmulatorBackend(card.tools, ask)
