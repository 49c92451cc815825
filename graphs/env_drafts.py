"""What code can tell of a decomposition before any model judges it: ids, parents, cycles, hops; and its scenario."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from agents.decomposer import NodeDraft


def _graph(nodes: Sequence[NodeDraft]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(node.id for node in nodes)
    graph.add_edges_from((parent, node.id) for node in nodes for parent in node.parents if parent in graph)
    return graph


def hops_and_width(nodes: Sequence[NodeDraft]) -> tuple[int, int]:
    """(tool nodes on the longest chain, tool nodes beyond it) of an acyclic draft."""
    tooled = {node.id for node in nodes if node.needs_tool}
    if not tooled:
        return 0, 0
    hops = nx.dag_longest_path_length(_graph(nodes).subgraph(tooled)) + 1
    return hops, len(tooled) - hops


def structure_faults(nodes: Sequence[NodeDraft], min_hops: int, max_hops: int) -> list[tuple[str, str]]:
    """(reason, detail) of everything that is wrong with the graph itself; empty for a sound one."""
    faults: list[tuple[str, str]] = []
    ids = [node.id for node in nodes]
    if len(set(ids)) < len(ids):
        faults.append(("duplicate_node_id", f"ids {', '.join(ids)}"))
    needs = {node.id: node.needs_tool for node in nodes}
    for node in nodes:
        for parent in node.parents:
            if parent not in needs:
                faults.append(("missing_parent", f"{node.id}: the parent {parent} does not exist"))
            elif not needs[parent]:
                faults.append(("toolless_parent", f"{node.id}: the parent {parent} is answered by reasoning"))
        if len(set(node.parents)) < len(node.parents):
            faults.append(("missing_parent", f"{node.id}: a parent stands twice"))
    if not nx.is_directed_acyclic_graph(_graph(nodes)):
        faults.append(("cyclic_graph", "the nodes depend on each other"))
    if not faults:
        hops, _ = hops_and_width(nodes)
        if not min_hops <= hops <= max_hops:
            faults.append(("hops_out_of_range", f"{hops} hops, wanted {min_hops} to {max_hops}"))
    return faults


def scenario_of(nodes: Sequence[NodeDraft]) -> str:
    """The scenario of a sound draft that can be answered."""
    hops, extra = hops_and_width(nodes)
    if hops == 1:
        return "parallel_single_hop" if extra else "single_hop"
    return "parallel_multi_hop" if extra else "multi_hop"
