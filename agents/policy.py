"""The policy as a role: a conversation and tools in, the next assistant turn out.

The loop around it is `graphs/solver.py`; here is its system prompt (a file per language) and one turn as a graph, so that
the role can be tried alone. What the model wrote is kept as it wrote it, malformed arguments included.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from agents.base import LANGUAGES, PROMPTS
from agents.context import Context
from astrolabe.records.ids import content_hash
from astrolabe.records.messages import Message, ToolSchema


@cache
def system_prompt(language: str) -> str:
    """The policy's system prompt in one language; English for one that has none."""
    name = language if language in LANGUAGES else "en"
    return (PROMPTS / f"policy.{name}.j2").read_text(encoding="utf-8").strip()


@cache
def prompt_hash() -> str:
    """Hash of the system prompts of all languages."""
    return content_hash({language: system_prompt(language) for language in LANGUAGES})


class PolicyState(TypedDict, total=False):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    seed: int


async def ask(state: PolicyState, runtime: Runtime[Context]) -> dict[str, Any]:
    """One assistant turn, appended; the system prompt goes first where the conversation has none."""
    ctx = runtime.context
    messages = [Message.model_validate(m) for m in state["messages"]]
    if not messages or messages[0].role != "system":
        messages.insert(0, Message(role="system", content=system_prompt(ctx.language)))
    reply = await ctx.client("policy").complete(
        messages,
        role="policy",
        seed=state.get("seed", ctx.seed),
        tools=[ToolSchema.model_validate(t) for t in state.get("tools") or []] or None,
    )
    turn = Message(
        role="assistant",
        content=reply.content,
        reasoning_content=reply.reasoning_content,
        tool_calls=reply.tool_calls or None,
    )
    return {"messages": [m.model_dump(mode="json") for m in [*messages, turn]]}


def build(context_schema: type[Context] = Context) -> Any:
    """The compiled one-node graph."""
    builder = StateGraph(PolicyState, context_schema=context_schema)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")
    builder.add_edge("ask", END)
    return builder.compile(name="policy")


graph = build()
