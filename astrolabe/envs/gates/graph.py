"""cyclic_graph, missing_parent, toolless_parent, target_without_tool, scenario_mismatch: the dependency graph."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import networkx as nx

from astrolabe.envs.gates.report import Finding
from astrolabe.records.environment import Environment

MAX_ORDERS = 24


def dependency_graph(env: Environment) -> nx.DiGraph:
    """Parents point to children; parents that do not exist are left out."""
    graph = nx.DiGraph()
    ids = {node.id for node in env.nodes}
    graph.add_nodes_from(node.id for node in env.nodes)
    graph.add_edges_from((parent, node.id) for node in env.nodes for parent in node.parents if parent in ids)
    return graph


def topological_orders(env: Environment, limit: int = MAX_ORDERS) -> list[list[str]]:
    """Up to `limit` orders of the nodes with a tool, the first in the row's own order where parents allow. The graph
    must be acyclic."""
    place = {node.id: i for i, node in enumerate(env.nodes)}
    tools = {node.id for node in env.nodes if node.tool is not None}
    graph = dependency_graph(env).subgraph(tools)
    first = list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
    others = (order for order in nx.all_topological_sorts(graph) if order != first)
    return [first, *islice(others, limit - 1)]


def hops_and_width(env: Environment) -> tuple[int, int]:
    """(nodes on the longest path, nodes beyond it) of the nodes with a tool."""
    tools = {node.id for node in env.nodes if node.tool is not None}
    if not tools:
        return 0, 0
    hops = nx.dag_longest_path_length(dependency_graph(env).subgraph(tools)) + 1
    return hops, len(tools) - hops


_SHAPES = {
    "single_hop": lambda hops, extra: hops == 1 and extra == 0,
    "multi_hop": lambda hops, extra: hops >= 2 and extra == 0,
    "parallel_single_hop": lambda hops, extra: hops == 1 and extra >= 1,
    "parallel_multi_hop": lambda hops, extra: hops >= 2 and extra >= 1,
    "no_tool": lambda hops, extra: hops == 0,
    "missing_parameter": lambda hops, extra: hops == 0,
}
_EXPECTS = {"no_tool": "abstain", "missing_parameter": "ask"}


def check_graph(env: Environment) -> list[Finding]:
    """Findings on the graph, its targets and its scenario."""
    findings: list[Finding] = []
    nodes = {node.id: node for node in env.nodes}
    for node in env.nodes:
        for parent in node.parents:
            if parent not in nodes:
                findings.append(Finding("missing_parent", f"the parent {parent!r} does not exist", node.id))
            elif nodes[parent].tool is None:
                findings.append(
                    Finding(
                        "toolless_parent", f"the parent {parent!r} has no tool, so nothing can flow from it", node.id
                    )
                )
    graph = dependency_graph(env)
    acyclic = nx.is_directed_acyclic_graph(graph)
    if not acyclic:
        cycle = " -> ".join(edge[0] for edge in nx.find_cycle(graph))
        findings.append(Finding("cyclic_graph", f"the nodes depend on each other: {cycle}"))
    findings += _targets(env)
    expected = _EXPECTS.get(env.scenario, "answer")
    if env.expect != expected:
        findings.append(Finding("scenario_mismatch", f"{env.scenario} expects {expected!r}, not {env.expect!r}"))
    if (env.answer_type == "none") != (expected != "answer"):
        findings.append(Finding("scenario_mismatch", f"answer type {env.answer_type} does not fit {env.scenario}"))
    if acyclic:
        hops, extra = hops_and_width(env)
        if not _SHAPES[env.scenario](hops, extra):
            findings.append(
                Finding("scenario_mismatch", f"{hops} hops and {extra} parallel nodes are not {env.scenario}")
            )
    return findings


def _targets(env: Environment) -> list[Finding]:
    findings = []
    names = {tool.name for tool in env.tools}
    goldens = Counter(golden.node for golden in env.goldens)
    tool_of = {node.id: node.tool for node in env.nodes}
    for node in env.nodes:
        if node.tool is None:
            continue
        if node.tool not in names:
            findings.append(Finding("target_without_tool", "no tool of this name", node.id, node.tool))
        if goldens[node.id] != 1:
            findings.append(Finding("target_without_tool", f"{goldens[node.id]} goldens, not one", node.id, node.tool))
    for golden in env.goldens:
        if tool_of.get(golden.node) != golden.tool:
            findings.append(
                Finding("target_without_tool", "the golden's tool is not its node's", golden.node, golden.tool)
            )
    return findings
