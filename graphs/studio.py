"""The graphs as LangGraph Studio shows them, listed in `langgraph.json`: the same graphs with a context that a form can
fill, whose clients are made on first use.

Without an address (`base_url`, or the variable ASTROLABE_MODEL_URL) the offline teacher is started on loopback when the
first model call is made; importing this module opens nothing. Batch runs never come here: they make their own clients.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from agents import decomposer as decomposer_roles
from agents import emulator as emulator_role
from agents import judge as judge_roles
from agents import planner as planner_roles
from agents import policy as policy_role
from agents import verifier as verifier_roles
from agents.context import Context
from agents.teacher import MODEL_NAME
from astrolabe.envs.executor import Executor
from astrolabe.envs.faults import FaultPlan
from astrolabe.records.card import read_card
from astrolabe.records.errors import UsageError
from astrolabe.records.messages import ToolSchema
from astrolabe.records.trajectory import Task
from graphs import environment_graph, trajectory_graph
from graphs.environment_context import EnvironmentContext
from graphs.solver import Budgets, solve
from graphs.solver_policies import ChatPolicy
from graphs.trajectory_context import TrajectoryContext
from serving.chat import ChatClient, ModelSpec
from serving.http import launch_in_thread


@cache
def _teacher_url() -> str:
    from agents.teacher.server import create_app

    return launch_in_thread(create_app(), name="teacher").url


@cache
def _client(base_url: str, model: str, temperature: float) -> ChatClient:
    url = base_url or os.environ.get("ASTROLABE_MODEL_URL", "") or _teacher_url()
    return ChatClient(ModelSpec(base_url=url, model=model or MODEL_NAME, temperature=temperature))


@dataclass(kw_only=True)
class StudioContext(Context):
    """What the form asks for. No key is asked for: a server that wants one is reached through a run's configuration."""

    base_url: str = ""
    """An OpenAI-compatible server; empty: ASTROLABE_MODEL_URL, else the offline teacher."""
    model: str = ""
    temperature: float = 0.7

    def client(self, role: str) -> ChatClient:
        return self.clients.get(role) or _client(self.base_url, self.model, self.temperature)


@dataclass(kw_only=True)
class StudioTrajectoryContext(StudioContext, TrajectoryContext):
    """The form of the trajectory graph."""


@dataclass(kw_only=True)
class StudioEnvironmentContext(StudioContext, EnvironmentContext):
    """The form of the environment graph."""


class SolverForm(TypedDict, total=False):
    """A question, and the card of the server whose tools may be used (null: none)."""

    question: str
    card: dict[str, Any] | None


class SolverView(SolverForm, total=False):
    messages: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    status: str
    failure: str | None


@dataclass(kw_only=True)
class StudioSolverContext(StudioContext):
    """The form of the solver."""

    fault_rate: float = 0.0
    max_turns: int = 8


async def play(state: SolverForm, runtime: Runtime[StudioSolverContext]) -> dict[str, Any]:
    """One episode of the solver with a chat policy, in the emulator."""
    ctx = runtime.context
    executor, tools = None, []
    if state.get("card"):
        card = read_card(state["card"], min_tools=1).card
        if card is None:
            raise UsageError("the card has no usable tool", "give a server card as in FORMATS")
        tools = [ToolSchema(function=tool) for tool in card.tools]
        backend = emulator_role.open_emulator(card, ctx, seed=ctx.seed)
        executor = Executor(tools, backend, faults=FaultPlan(rate=ctx.fault_rate, seed=ctx.seed))
    task = Task(question=state["question"]).with_id()
    budgets = Budgets(max_turns=ctx.max_turns)
    system = policy_role.system_prompt(ctx.language)
    episode = await solve(
        task, tools, executor, ChatPolicy(ctx.client("policy")), budgets=budgets, system=system, seed=ctx.seed
    )
    return {
        "messages": [m.model_dump(mode="json") for m in episode.messages],
        "calls": [c.to_json() for c in episode.calls],
        "status": episode.status,
        "failure": episode.failure,
    }


def _solver() -> Any:
    builder = StateGraph(SolverView, context_schema=StudioSolverContext, input_schema=SolverForm)
    builder.add_node("play", play)
    builder.add_edge(START, "play")
    builder.add_edge("play", END)
    return builder.compile(name="solver")


planner_chains = planner_roles.propose_chains.build(StudioContext)
planner_vote = planner_roles.vote_chain.build(StudioContext)
planner_task = planner_roles.write_task.build(StudioContext)
planner_check = planner_roles.check_task.build(StudioContext)
planner_augment = planner_roles.augment_task.build(StudioContext)
planner_score = planner_roles.score_task.build(StudioContext)
emulator = emulator_role.emulate.build(StudioContext)
policy = policy_role.build(StudioContext)
trajectory = trajectory_graph.build(StudioTrajectoryContext)
environment = environment_graph.build(StudioEnvironmentContext)
solver = _solver()
decomposer_decompose = decomposer_roles.decompose.build(StudioContext)
decomposer_tool_document = decomposer_roles.tool_document.build(StudioContext)
decomposer_scale_complexity = decomposer_roles.scale_complexity.build(StudioContext)
decomposer_call_arguments = decomposer_roles.call_arguments.build(StudioContext)
decomposer_tool_code = decomposer_roles.tool_code.build(StudioContext)
decomposer_neighbour_tools = decomposer_roles.neighbour_tools.build(StudioContext)
verifier_necessity = verifier_roles.necessity.build(StudioContext)
verifier_dependency = verifier_roles.dependency.build(StudioContext)
verifier_atomicity = verifier_roles.atomicity.build(StudioContext)
verifier_serialisation = verifier_roles.serialisation.build(StudioContext)
verifier_completeness = verifier_roles.completeness.build(StudioContext)
verifier_answerable = verifier_roles.answerable.build(StudioContext)
judge_query_understanding = judge_roles.BY_MODEL["query_understanding"].agent.build(StudioContext)
judge_query_planning = judge_roles.BY_MODEL["query_planning"].agent.build(StudioContext)
judge_tool_understanding = judge_roles.BY_MODEL["tool_understanding"].agent.build(StudioContext)
judge_tool_planning = judge_roles.BY_MODEL["tool_planning"].agent.build(StudioContext)
judge_tool_conciseness = judge_roles.BY_MODEL["tool_conciseness"].agent.build(StudioContext)
judge_final_answer = judge_roles.BY_MODEL["final_answer"].agent.build(StudioContext)
