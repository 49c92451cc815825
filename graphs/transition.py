"""The tool transition graph: which tool may follow which, from proposed chains, and seeded walks over it.

A node is a tool, an edge an adjacent pair of a chain, its weight the number of chains that hold the pair. A name that the
server does not have severs the chain there: `a, ghost, c` gives no edge `a -> c`. Walks are simple paths of bounded length,
drawn by weight, bounded in number and in attempts (ASTRA enumerates all walks, cycles included: 193,248 of them on a
dense graph of 12 tools).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import pairwise

import networkx as nx


def transition_graph(chains: Sequence[Sequence[str]], names: Collection[str]) -> tuple[nx.DiGraph, list[str]]:
    """(graph, unknown names in the order in which they were met). Edges carry `weight`; a tool follows itself nowhere."""
    graph: nx.DiGraph = nx.DiGraph()
    known, unknown = set(names), dict[str, None]()
    for chain in chains:
        unknown |= dict.fromkeys(name for name in chain if name not in known)
        for first, second in pairwise(chain):
            if first in known and second in known and first != second:
                weight = graph.get_edge_data(first, second, {"weight": 0})["weight"]
                graph.add_edge(first, second, weight=weight + 1)
    return graph, list(unknown)


def _draw(options: Sequence[str], weights: Sequence[int], rng: random.Random) -> str:
    return rng.choices(options, weights=weights)[0]


def sample_walks(
    graph: nx.DiGraph, rng: random.Random, *, limit: int, min_length: int = 2, max_length: int = 5, attempts: int = 64
) -> list[list[str]]:
    """At most `limit` distinct simple paths of `min_length` to `max_length` tools, in the order drawn.

    The start is drawn by the weight of its edges, each step by the edge's weight, the length uniformly; a walk that meets
    a dead end is kept if it is long enough. Nodes are taken in sorted order, so that equal graphs and seeds give equal
    walks however the graph was built.
    """
    starts = sorted(node for node in graph if graph.out_degree(node))
    if not starts:
        return []
    weights = [int(graph.out_degree(node, weight="weight")) for node in starts]
    walks: dict[tuple[str, ...], None] = {}
    for _ in range(attempts):
        if len(walks) >= limit:
            break
        wanted = rng.randint(min_length, max_length)
        walk = [_draw(starts, weights, rng)]
        while len(walk) < wanted:
            after = sorted(node for node in graph.successors(walk[-1]) if node not in walk)
            if not after:
                break
            walk.append(_draw(after, [graph[walk[-1]][node]["weight"] for node in after], rng))
        if len(walk) >= min_length:
            walks[tuple(walk)] = None
    return [list(walk) for walk in walks]
