"""The chat policy of the solver: acts through a chat server, which renders and parses.

For demonstration and evaluation; a policy that is trained acts through `token_policy.TokenPolicy`.
"""

from __future__ import annotations

import json
from typing import Any

from astrolabe.records.ids import seed_for
from astrolabe.records.messages import Message
from graphs.solver import Episode, PolicyFailure, Turn
from serving.chat import ChatClient, ModelFailure


class ChatPolicy:
    """Acts through `/v1/chat/completions` with tools."""

    def __init__(
        self,
        client: ChatClient,
        *,
        role: str = "policy",
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._client, self._role = client, role
        self._temperature, self._max_tokens = temperature, max_tokens

    async def act(self, episode: Episode) -> Turn:
        limit = min(self._max_tokens or episode.tokens_left, episode.tokens_left)
        try:
            reply = await self._client.complete(
                [_on_the_wire(message) for message in episode.messages],
                role=self._role,
                seed=seed_for(episode.seed, "turn", episode.turn),
                tools=episode.tools or None,
                temperature=self._temperature,
                max_tokens=limit,
            )
        except ModelFailure as failure:
            if failure.kind == "bad_request" and "context" in str(failure).lower():
                return Turn(message=Message(role="assistant"), finish="context")
            raise PolicyFailure(failure.kind, str(failure)) from failure
        message = Message(
            role="assistant",
            content=reply.content,
            reasoning_content=reply.reasoning_content,
            tool_calls=reply.tool_calls or None,
        )
        cut = reply.finish_reason == "length"
        return Turn(message=message, finish="length" if cut else "stop", usage=reply.usage, model=reply.model)


def _on_the_wire(message: Message) -> dict[str, Any]:
    """The message as a server's template can take it: servers parse the arguments in the history and refuse text that
    is no JSON object, so such text is sent quoted. The record keeps what the model wrote."""
    wire = message.model_dump(mode="json")
    for call in wire.get("tool_calls", []):
        function = call["function"]
        if not isinstance(_json_or_none(function["arguments"]), dict):
            function["arguments"] = json.dumps({"malformed_arguments": function["arguments"]}, ensure_ascii=False)
    return wire


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
