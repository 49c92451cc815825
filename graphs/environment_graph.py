"""Environment synthesis: one sample of one knowledge row in, one certified executable environment out.

decompose -> structure -> verify -> tools -> assemble -> certify. Code checks the graph before judges see it, five judges
fail closed, every tool is gated alone with its failing case fed back, and the finished row is gated again after it was
serialised and reopened. Whatever ends on the way is a rejected row with its stage and reasons.
"""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from agents import decomposer, verifier
from agents.base import Agent
from agents.decomposer import DecomposeReply, DecomposeRequest, Kind, NeighbourRequest, NodeDraft, ToolDoc
from agents.verifier import JUDGES, AnswerableRequest, TraceRequest
from astrolabe import __version__
from astrolabe.envs.distractors import band_distractors
from astrolabe.records.base import Usage
from astrolabe.records.card import KnowledgeRow
from astrolabe.records.environment import Distractor, Environment, EnvTool, Goal, Golden, Node
from astrolabe.records.funnel import FunnelEntry
from astrolabe.records.ids import rng_for, seed_for
from graphs.env_drafts import scenario_of, structure_faults
from graphs.env_tools import BuiltNode, NodeBuilder, merge, merge_data
from graphs.environment_context import EnvironmentContext

_EXPECT = {"no_tool": "abstain", "missing_parameter": "ask"}


class EnvironmentInput(TypedDict, total=False):
    """One sample of one knowledge row."""

    row: dict[str, Any]
    """`{"domain","text","language"}`."""
    key: str
    """Its name in the run; default: the row's id and the variation."""
    variation: int


class EnvironmentState(EnvironmentInput, total=False):
    knowledge: KnowledgeRow
    seed: int
    kind: Kind
    draft: DecomposeReply | None
    built: list[BuiltNode]
    environment: Environment | None
    data: dict[str, Any]
    accepted: list[dict[str, Any]]
    rejected: Annotated[list[dict[str, Any]], operator.add]
    funnel: Annotated[list[FunnelEntry], operator.add]
    usage: Annotated[Usage, operator.add]
    models: Annotated[dict[str, str], operator.or_]
    audit: dict[str, Any]


def prompt_hashes() -> dict[str, str]:
    """agent -> hash of its prompt."""
    agents: list[Agent[Any, Any]] = [*decomposer.AGENTS, *verifier.AGENTS]
    return {agent.name: agent.prompt_hash for agent in agents}


def _step(stage: str, state: EnvironmentState, reasons: Sequence[str] = (), detail: str = "") -> dict[str, Any]:
    """The funnel's entry of a stage, with the rejected row if there are reasons."""
    reasons = list(dict.fromkeys(reasons))
    update: dict[str, Any] = {"funnel": [(stage, 1, 0 if reasons else 1, {reasons[0]: 1} if reasons else {})]}
    if reasons:
        draft = state.get("draft")
        row = {
            "domain": state["knowledge"].domain,
            "variation": state["variation"],
            "kind": state["kind"],
            "question": draft.question if draft is not None else None,
            "nodes": [node.model_dump(mode="json") for node in draft.nodes] if draft is not None else [],
        }
        update["rejected"] = [
            {"item": state["key"], "stage": stage, "reasons": reasons, "detail": detail[:2000], "row": row}
        ]
    return update


def kind_of(ctx: EnvironmentContext, seed: int) -> Kind:
    """Which kind of sample this is: a seeded draw by the context's shares."""
    draw = rng_for(seed, "kind").random()
    for kind, share in (
        ("no_tool", ctx.no_tool_share),
        ("missing_parameter", ctx.missing_parameter_share),
        ("stateful", ctx.stateful_share),
    ):
        if draw < share:
            return kind  # type: ignore[return-value]
        draw -= share
    return "answer"


async def decompose(state: EnvironmentState, runtime: Runtime[EnvironmentContext]) -> dict[str, Any]:
    """The question and its dependency graph."""
    ctx = runtime.context
    row = KnowledgeRow.model_validate(state["row"])
    variation = state.get("variation", 0)
    key = state.get("key") or f"{row.content_id()}-{variation}"
    seed = seed_for(ctx.seed, "environment", key)
    kind = kind_of(ctx, seed)
    request = DecomposeRequest(
        language=row.language, domain=row.domain, text=row.text, kind=kind, min_hops=ctx.min_hops,
        max_hops=ctx.max_hops, variation=variation,
    )  # fmt: skip
    result = await decomposer.decompose(request, ctx, seed=seed, item="decompose")
    known: EnvironmentState = {
        "knowledge": row,
        "key": key,
        "variation": variation,
        "seed": seed,
        "kind": kind,
        "draft": result.reply,
    }
    reasons = [] if result.reply is not None else [result.failure or "invalid_reply"]
    return {
        **known,
        **_step("decompose", known, reasons, result.detail),
        "usage": result.usage,
        "models": {"decomposer": result.model} if result.model else {},
        "accepted": [],
    }


async def structure(state: EnvironmentState, runtime: Runtime[EnvironmentContext]) -> dict[str, Any]:
    """Checks in code: ids, parents, cycles, hops. Of an unanswerable question the nodes are only what tools are there."""
    draft, ctx = _draft(state), runtime.context
    low = ctx.min_hops if state["kind"] == "answer" else 1
    faults = structure_faults(draft.nodes, low, ctx.max_hops)
    return _step("structure", state, [reason for reason, _ in faults], "; ".join(text for _, text in faults))


async def verify(state: EnvironmentState, runtime: Runtime[EnvironmentContext]) -> dict[str, Any]:
    """The judges, all at once. One that gives no valid verdict leaves the sample unjudged, and so rejected."""
    draft, ctx, knowledge = _draft(state), runtime.context, state["knowledge"]
    request = TraceRequest(language=knowledge.language, text=knowledge.text, question=draft.question, nodes=draft.nodes)
    unanswerable = state["kind"] in _EXPECT
    results = await asyncio.gather(
        *(judge.agent(request, ctx, seed=state["seed"], item=judge.name) for judge in JUDGES)
    )
    reasons, details, audit = [], [], {}
    for judge, result in zip(JUDGES, results, strict=True):
        faults = None if result.reply is None else judge.failing(result.reply, draft.nodes)
        if faults is not None and unanswerable and judge.name == "completeness":
            faults = [] if faults else ["the tools at hand answer the question after all"]
        verdict = "unjudged" if faults is None else "fail" if faults else "pass"
        audit[judge.name] = {verdict: 1}
        if verdict != "pass":
            reasons.append(f"{judge.name}_{verdict}")
            details.append(f"{judge.name}: " + ("; ".join(faults) if faults else result.detail or "no valid verdict"))
    models = [result.model for result in results if result.model]
    return {
        **_step("verify", state, reasons, " | ".join(details)),
        "usage": sum((result.usage for result in results), Usage()),
        "models": {"verifier": models[0]} if models else {},
        "audit": audit,
    }


async def tools(state: EnvironmentState, runtime: Runtime[EnvironmentContext]) -> dict[str, Any]:
    """A gated tool for every node that needs one, then tools that do the same merged."""
    draft, ctx = _draft(state), runtime.context
    by_id = {node.id: node for node in draft.nodes}

    async def build(node: NodeDraft) -> BuiltNode:
        if not node.needs_tool:
            return BuiltNode(node)
        parents = [by_id[parent] for parent in node.parents]
        builder = NodeBuilder(ctx, state["knowledge"], node, parents, seed=state["seed"], state=draft.state)
        return await builder.build()

    built = list(await asyncio.gather(*map(build, draft.nodes)))
    data, clashes = merge_data([node.data for node in built])
    reasons = [reason for node in built for reason in node.reasons]
    details = [f"{node.draft.id}: {node.detail}" for node in built if node.reasons]
    if clashes:
        reasons.append("data_conflict")
        details.append(f"two tools hold different facts under {', '.join(clashes)}")
    if not reasons:
        await merge(built, data, ctx, stateful=draft.state is not None)
    step = _step("tools", state, reasons, " | ".join(details))
    attempts = [
        {
            "item": state["key"],
            "stage": "tool_gates",
            "reasons": fail["reasons"],
            "detail": fail["detail"][:2000],
            "row": fail["row"],
        }
        for node in built
        for fail in node.failed
    ]
    counts = Counter(fail["reasons"][0] for node in built for fail in node.failed)
    tried = sum(node.attempts for node in built)
    step["funnel"] = [
        ("tool_gates", tried, tried - sum(counts.values()), dict(sorted(counts.items()))),
        *step["funnel"],
    ]
    return {
        **step,
        "rejected": attempts + step.get("rejected", []),
        "built": built,
        "data": data,
        "usage": sum((node.usage for node in built), Usage()),
        "models": {role: model for node in built for role, model in node.models.items() if model},
    }


async def assemble(state: EnvironmentState, runtime: Runtime[EnvironmentContext]) -> dict[str, Any]:
    """The record: nodes, tools, goldens, and distractors drawn over the three bands from the neighbours."""
    draft, ctx, knowledge = _draft(state), runtime.context, state["knowledge"]
    true_tools = list({node.tool.name: node.tool for node in state["built"] if node.tool is not None}.values())
    rng = rng_for(state["seed"], "assemble")
    others = [text for text in ctx.other_texts.get(knowledge.language, []) if text != knowledge.text]
    request = NeighbourRequest(
        language=knowledge.language,
        question=draft.question,
        text=knowledge.text,
        other_texts=rng.sample(others, min(2, len(others))),
        tools=[ToolDoc(**tool.model_dump(exclude={"code"})) for tool in true_tools],
        count=2 * ctx.max_distractors,
    )
    result = await decomposer.neighbour_tools(request, ctx, seed=state["seed"], item="neighbours")
    data = dict(state["data"])
    pool: list[EnvTool] = []
    tables: dict[str, dict[str, Any]] = {}
    for tool in result.reply.tools if result.reply is not None else []:
        if not set(tool.data or {}) & set(data):
            pool.append(EnvTool(**tool.model_dump(exclude={"data"})))
            tables[tool.name] = tool.data or {}
    wanted = rng.randint(1, ctx.max_distractors)
    bands = {"high": (wanted + 2) // 4, "medium": (wanted + 1) // 2, "low": wanted // 3}
    distractors = await asyncio.to_thread(band_distractors, true_tools, pool, rng, bands, knowledge.language)  # type: ignore[arg-type]
    distractors = distractors[:wanted]
    for distractor in distractors:
        data.update({key: table for key, table in tables[distractor.name].items() if key not in data})
    environment = _record(state, ctx, draft, true_tools, distractors, data)
    rng.shuffle(environment.tools)
    reasons, detail, audit, usage = await _refuse_answerable(state, ctx, environment)
    return {
        **_step("assemble", state, reasons, detail),
        "environment": environment,
        "usage": result.usage + usage,
        "audit": state.get("audit", {}) | audit,
    }


async def _refuse_answerable(
    state: EnvironmentState, ctx: EnvironmentContext, environment: Environment
) -> tuple[list[str], str, dict[str, Any], Usage]:
    """(reasons, detail, audit, usage) of the judgement that no call can answer an unanswerable question."""
    if state["kind"] not in _EXPECT:
        return [], "", {}, Usage()
    request = AnswerableRequest(
        language=environment.language,
        question=environment.question,
        tools=[tool.function for tool in environment.policy_tools()],
    )
    result = await verifier.answerable(request, ctx, seed=state["seed"], item="answerable")
    verdict = "unjudged" if result.reply is None else "fail" if result.reply.answerable else "pass"
    reasons = [] if verdict == "pass" else [f"answerable_{verdict}"]
    return reasons, result.reply.reason if result.reply else result.detail, {"answerable": {verdict: 1}}, result.usage


def _record(
    state: EnvironmentState,
    ctx: EnvironmentContext,
    draft: DecomposeReply,
    true_tools: list[EnvTool],
    distractors: list[Distractor],
    data: dict[str, Any],
) -> Environment:
    unanswerable = state["kind"] in _EXPECT
    nodes = [] if unanswerable else [
        Node(id=n.draft.id, question=n.draft.question, answer=n.draft.answer, parents=n.draft.parents, tool=n.tool.name if n.tool else None)
        for n in state["built"]
    ]  # fmt: skip
    goldens: list[Golden] = [] if unanswerable else [n.golden for n in state["built"] if n.golden is not None]
    return Environment(
        schema="astrolabe.environment/1",
        language=state["knowledge"].language,
        domain=state["knowledge"].domain,
        question=draft.question,
        answer=draft.answer,
        scenario=state["kind"] if unanswerable else scenario_of(draft.nodes),  # type: ignore[arg-type]
        expect=_EXPECT.get(state["kind"], "answer"),  # type: ignore[arg-type]
        answer_type=draft.answer_type,
        nodes=nodes,
        tools=true_tools,
        goldens=goldens,
        distractors=distractors,
        data=data or None,
        mode="stateful" if draft.state is not None else "stateless",
        state=draft.state,
        goal=None if draft.goal is None else Goal.model_validate(draft.goal),
    )


async def certify(state: EnvironmentState, runtime: Runtime[EnvironmentContext]) -> dict[str, Any]:
    """All gates on the serialised row. A distractor that gives something away is taken out, once, and the row gated anew."""
    ctx, environment = runtime.context, state["environment"]
    assert environment is not None
    environment = environment.with_id()
    environment.provenance = {
        "source": ctx.source,
        "license": ctx.license,
        "seed": ctx.seed,
        "version": __version__,
        "knowledge": state["knowledge"].content_id(),
        "models": dict(sorted(state.get("models", {}).items())),
        "prompts": prompt_hashes(),
        "usage": state["usage"].model_dump(),
    }
    verdict = await ctx.gates.acheck(environment)
    names = {distractor.name for distractor in environment.distractors}
    guilty = {finding["tool"] for finding in verdict.detail}
    if not verdict.passed and guilty and guilty <= names:
        environment = _without(environment, guilty)
        verdict = await ctx.gates.acheck(environment)
    step = _step("certify", state, verdict.reasons, verdict.text())
    if verdict.passed:
        row = environment.model_copy(update={"certificate": verdict.certificate}).to_json()
        return {**step, "accepted": [row], "funnel": [*step["funnel"], ("export", 1, 1, {})]}
    for rejected in step["rejected"]:
        rejected["row"] = environment.to_json()
    return step


def _without(environment: Environment, names: set[str]) -> Environment:
    """The environment without these distractors."""
    kept = [distractor for distractor in environment.distractors if distractor.name not in names]
    return environment.model_copy(update={"distractors": kept}).with_id()


def _draft(state: EnvironmentState) -> DecomposeReply:
    draft = state["draft"]
    assert draft is not None
    return draft


STAGES = (decompose, structure, verify, tools, assemble, certify)


def build(context_schema: type[EnvironmentContext] = EnvironmentContext) -> Any:
    """The compiled graph; Studio asks for one with a context of its own."""
    builder = StateGraph(EnvironmentState, context_schema=context_schema, input_schema=EnvironmentInput)
    for stage in STAGES:
        builder.add_node(stage.__name__, stage)
    builder.add_edge(START, "decompose")
    for index, stage in enumerate(STAGES[:-1]):
        following = STAGES[index + 1].__name__

        def route(state: EnvironmentState, name: str = stage.__name__, following: str = following) -> str:
            ended = any(row["stage"] == name for row in state.get("rejected", []))
            return END if ended else following

        builder.add_conditional_edges(stage.__name__, route, {following: following, END: END})
    builder.add_edge("certify", END)
    return builder.compile(name="environment")


graph = build()
