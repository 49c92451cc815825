"""The one agent loop: policy -> router -> tools -> policy -> ... -> finish, within budgets.

Synthesis, RL rollouts, evaluation and serving all run this graph; what differs is the `Policy` (a chat server, or
a token server with a renderer) and the executor in the runtime context. The graph keeps the
episode as messages and executor records; a token policy keeps its tape beside them.

An episode ends in one of three ways, by one question: could the policy have caused it?
- `finished`: a turn without calls that the model ended itself.
- `truncated`: the policy's own turn, call, token or context budget is spent; it is scored as it stands.
- `failed`: the model server, an infrastructure error of a tool or the wall deadline; it is never scored.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, cast

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from astrolabe.records.base import Usage
from astrolabe.records.errors import UsageError
from astrolabe.records.messages import Message, ToolCall, ToolSchema
from astrolabe.records.trajectory import CallError, CallRecord, Task

Status = Literal["running", "finished", "truncated", "failed"]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What one episode may spend. Turns, calls and tokens are the policy's own; `wall_s` is everybody's."""

    max_turns: int = 8
    max_calls: int = 16
    max_tokens: int = 2048
    """Sampled tokens over all turns."""
    max_context: int | None = None
    """Tokens of prompt and reply together that the model can hold; None: the server's own limit."""
    wall_s: float = 300.0


class PolicyFailure(Exception):
    """The policy could not act for a reason that is not its own doing: the episode fails and is not scored.

    `kind` is a short code, e.g. `unreachable`, `timeout`, `abort`."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One assistant turn."""

    message: Message
    """`tool_calls[].function.arguments` is the text that the model wrote, also where it is malformed."""
    finish: Literal["stop", "length", "context"] = "stop"
    """`length`: cut by a token limit. `context`: nothing was sampled, for the prompt fills the window."""
    usage: Usage = field(default_factory=Usage)
    model: str = ""
    tape: Any = None
    """The policy's own memory of the episode (`token_policy.Tape`), handed back at its next turn."""


@dataclass(kw_only=True)
class Episode:
    """An episode, under way (what a policy acts on) or ended (what `solve` returns)."""

    task: Task
    tools: list[ToolSchema]
    messages: list[Message]
    calls: list[CallRecord] = field(default_factory=list)
    turn: int = 0
    """Assistant turns so far: the index of the next one."""
    usage: Usage = field(default_factory=Usage)
    status: Status = "running"
    failure: str | None = None
    """`failed`: `model_<kind>`, `tool_<kind>` or `deadline`. `truncated`: `turns`, `calls`, `tokens` or `context`."""
    tape: Any = None
    model: str = ""
    seed: int = 0
    budgets: Budgets = field(default_factory=Budgets)

    @property
    def tokens_left(self) -> int:
        return max(0, self.budgets.max_tokens - self.usage.completion_tokens)

    @property
    def final_text(self) -> str:
        """The text of a last turn without calls; empty when the episode ended on something else."""
        last = self.messages[-1] if self.messages else None
        return last.content if last is not None and last.role == "assistant" and not last.tool_calls else ""


class Policy(Protocol):
    """What acts. Raises `PolicyFailure` (or the client's `ModelFailure`) when the server is at fault."""

    async def act(self, episode: Episode) -> Turn: ...


class ToolExecutor(Protocol):
    """The part of `astrolabe.envs.executor.Executor` that the loop uses."""

    @property
    def records(self) -> Sequence[CallRecord]: ...

    async def execute(self, call_id: str, turn: int, name: str, arguments_text: str) -> tuple[CallRecord, str]: ...


class _NoTools:
    """The executor of an episode without tools: a call is answered as an unknown tool."""

    records: tuple[CallRecord, ...] = ()

    async def execute(self, call_id: str, turn: int, name: str, arguments_text: str) -> tuple[CallRecord, str]:
        error = CallError.model_validate({"class": "policy", "kind": "unknown_tool", "message": "there are no tools"})
        record = CallRecord(id=call_id, turn=turn, tool=name, arguments=None, status="error", error=error)
        return record, "Error: there are no tools"


class SolverInput(TypedDict, total=False):
    task: Task
    tools: list[ToolSchema]
    system: str | None


class SolverState(SolverInput, total=False):
    messages: Annotated[list[Message], operator.add]
    calls: Annotated[list[CallRecord], operator.add]
    turn: int
    usage: Usage
    status: Status
    failure: str | None
    cut: str | None
    """Why the last turn ends the episode once its calls are answered."""
    tape: Any
    model: str


@dataclass(kw_only=True)
class SolverContext:
    """Who acts and on what. Made by the caller; `policy` is a `Policy`, `executor` a `ToolExecutor` (None: no tools)."""

    policy: Any = None
    executor: Any = None
    budgets: Budgets = field(default_factory=Budgets)
    seed: int = 0
    deadline: float | None = None
    """On the event loop's clock; set from `budgets.wall_s` at the start when None."""


def _episode(state: SolverState, context: SolverContext) -> Episode:
    return Episode(
        task=state["task"],
        tools=state.get("tools") or [],
        messages=state.get("messages", []),
        calls=state.get("calls", []),
        turn=state.get("turn", 0),
        usage=state.get("usage", Usage()),
        status=state.get("status", "running"),
        failure=state.get("failure"),
        tape=state.get("tape"),
        model=state.get("model", ""),
        seed=context.seed,
        budgets=context.budgets,
    )


async def start(state: SolverState, runtime: Runtime[SolverContext]) -> dict[str, Any]:
    """The opening messages, and the deadline."""
    if runtime.context is None or runtime.context.policy is None:
        raise UsageError("the solver has no policy", "pass SolverContext(policy=..., executor=...) as the context")
    if runtime.context.deadline is None:
        runtime.context.deadline = asyncio.get_running_loop().time() + runtime.context.budgets.wall_s
    opening = [Message(role="user", content=state["task"].question)]
    if state.get("system"):
        opening.insert(0, Message(role="system", content=str(state["system"])))
    return {"messages": opening, "turn": 0, "usage": Usage(), "status": "running", "failure": None, "cut": None}


def _with_ids(message: Message, taken: int) -> Message:
    """The message with its calls renumbered `call_<n>` over the episode: servers' own ids repeat or are random."""
    if not message.tool_calls:
        return message
    calls = [
        ToolCall(id=f"call_{taken + offset}", function=call.function)
        for offset, call in enumerate(message.tool_calls, 1)
    ]
    return message.model_copy(update={"tool_calls": calls})


async def policy(state: SolverState, runtime: Runtime[SolverContext]) -> dict[str, Any]:
    """One assistant turn."""
    context, episode = runtime.context, _episode(state, runtime.context)
    if episode.tokens_left == 0:
        return {"status": "truncated", "failure": "tokens"}
    try:
        async with asyncio.timeout_at(context.deadline):
            turn: Turn = await context.policy.act(episode)
    except TimeoutError:
        return {"status": "failed", "failure": "deadline"}
    except PolicyFailure as failure:
        return {"status": "failed", "failure": f"model_{failure.kind}"}
    if turn.finish == "context":
        return {"status": "truncated", "failure": "context", "tape": turn.tape}
    message = _with_ids(turn.message, len(episode.calls))
    usage = episode.usage + turn.usage
    update: dict[str, Any] = {
        "messages": [message],
        "turn": episode.turn + 1,
        "usage": usage,
        "tape": turn.tape,
        "model": turn.model or episode.model,
        "cut": "tokens" if turn.finish == "length" else None,
    }
    if not message.tool_calls:
        update |= {"status": "truncated", "failure": "tokens"} if turn.finish == "length" else {"status": "finished"}
    elif update["cut"] is None and episode.turn + 1 >= context.budgets.max_turns:
        update["cut"] = "turns"
    return update


def router(state: SolverState) -> Literal["tools", "finish"]:
    """To the tools when the last turn called some; else the episode has ended."""
    return "tools" if state["status"] == "running" else "finish"


async def tools(state: SolverState, runtime: Runtime[SolverContext]) -> dict[str, Any]:
    """Execute the last turn's calls in order, one record and one tool message each, also for what cannot be parsed."""
    context = runtime.context
    executor = context.executor or _NoTools()
    last, turn = state["messages"][-1], state["turn"] - 1
    messages: list[Message] = []
    records: list[CallRecord] = []
    update: dict[str, Any] = {"messages": messages, "calls": records}
    for call in last.tool_calls or []:
        try:
            async with asyncio.timeout_at(context.deadline):
                record, text = await executor.execute(call.id, turn, call.function.name, call.function.arguments)
        except TimeoutError:
            return update | {"status": "failed", "failure": "deadline"}
        records.append(record)
        messages.append(
            Message(
                role="tool",
                content=text,
                tool_call_id=call.id,
                name=call.function.name,
            )
        )
        if record.error is not None and record.error.class_ == "infra" and not record.injected:
            return update | {"status": "failed", "failure": f"tool_{record.error.kind}"}
    if state.get("cut"):
        return update | {"status": "truncated", "failure": state["cut"]}
    if len(state.get("calls", [])) + len(records) > context.budgets.max_calls:
        return update | {"status": "truncated", "failure": "calls"}
    return update


def after_tools(state: SolverState) -> Literal["policy", "finish"]:
    return "policy" if state["status"] == "running" else "finish"


async def finish(state: SolverState) -> dict[str, Any]:
    """The end of every episode: nothing is left `running`."""
    assert state["status"] != "running"
    return {"status": state["status"]}


def _build() -> StateGraph[SolverState, SolverContext, SolverInput, SolverState]:
    builder = StateGraph(SolverState, context_schema=SolverContext, input_schema=SolverInput)
    builder.add_node("start", start)
    builder.add_node("policy", policy)
    builder.add_node("tools", tools)
    builder.add_node("finish", finish)
    builder.add_edge(START, "start")
    builder.add_edge("start", "policy")
    builder.add_conditional_edges("policy", router)
    builder.add_conditional_edges("tools", after_tools)
    builder.add_edge("finish", END)
    return builder


graph = _build().compile(name="solver")


async def solve(
    task: Task,
    tools: list[ToolSchema],
    executor: ToolExecutor | None,
    policy: Policy,
    *,
    budgets: Budgets | None = None,
    system: str | None = None,
    seed: int = 0,
) -> Episode:
    """Run one episode through the compiled graph. Never raises for what goes wrong inside the episode's servers and
    tools (see `Episode.failure`); an exception from here is a bug, or the caller's cancellation."""
    budgets = budgets or Budgets()
    context = SolverContext(policy=policy, executor=executor, budgets=budgets, seed=seed)
    state = await graph.ainvoke(
        SolverInput(task=task, tools=tools, system=system),
        {"recursion_limit": 2 * budgets.max_turns + 6},
        context=context,
    )
    return _episode(cast("SolverState", state), context)
