"""The transition graph, its walks, and the argument-flow check."""

from __future__ import annotations

import random
from itertools import pairwise

from astrolabe.records.messages import FunctionSchema
from graphs.argument_flow import argument_gaps
from graphs.transition import sample_walks, transition_graph


def tool(name: str, required: dict[str, dict], description: str = "Does one thing well.") -> FunctionSchema:
    parameters = {"type": "object", "properties": required, "required": list(required)}
    return FunctionSchema(name=name, description=description, parameters=parameters)


def test_i11_an_unknown_tool_severs_the_edge_and_bridges_nothing():
    graph, unknown = transition_graph([["a", "ghost", "c"], ["a", "b"]], {"a", "b", "c"})
    assert unknown == ["ghost"]
    assert list(graph.edges) == [("a", "b")]


def test_edges_count_the_chains_that_hold_them():
    graph, _ = transition_graph([["a", "b"], ["a", "b", "c"], ["b", "b"]], {"a", "b", "c"})
    assert graph["a"]["b"]["weight"] == 2
    assert not graph.has_edge("b", "b")


def test_i11_walks_are_simple_paths_of_bounded_length_along_edges():
    names = [f"t{n}" for n in range(12)]
    dense, _ = transition_graph([[a, b] for a in names for b in names if a != b], names)
    walks = sample_walks(dense, random.Random(0), limit=40)
    assert len(walks) == 40, "a dense graph of 12 tools gives as many as are asked for, not 193,248"
    for walk in walks:
        assert 2 <= len(walk) <= 5
        assert len(set(walk)) == len(walk)
        assert all(dense.has_edge(*edge) for edge in pairwise(walk))
    assert len({tuple(w) for w in walks}) == len(walks)


def test_walks_depend_on_the_seed_only_and_not_on_the_order_of_chains():
    chains = [["a", "b", "c"], ["c", "d"], ["b", "d", "a"]]
    forward, _ = transition_graph(chains, "abcd")
    backward, _ = transition_graph(chains[::-1], "dcba")
    draw = [sample_walks(g, random.Random(7), limit=5) for g in (forward, backward)]
    assert draw[0] == draw[1]


def test_a_heavy_edge_is_walked_more_often_than_a_light_one():
    graph, _ = transition_graph([["a", "b"]] * 9 + [["a", "c"]], "abc")
    first = [sample_walks(graph, random.Random(seed), limit=1, max_length=2)[0] for seed in range(200)]
    assert first.count(["a", "b"]) > 3 * first.count(["a", "c"]) > 0


def test_a_graph_without_edges_has_no_walks():
    graph, _ = transition_graph([["a"], ["ghost", "a"]], {"a"})
    assert sample_walks(graph, random.Random(0), limit=5) == []


def test_i12_an_argument_that_only_a_tool_can_give_needs_that_tool_before_it():
    text = {"type": "string"}
    snapshot = tool("page_snapshot", {}, "Takes a snapshot of the page with references.")
    click = tool("click", {"ref": {**text, "description": "Element reference from the page snapshot"}})
    tools = {t.name: t for t in (snapshot, click)}
    assert argument_gaps(["page_snapshot", "click"], tools) == []
    gaps = argument_gaps(["click", "page_snapshot"], tools)
    assert [(g.tool, g.argument, g.reason) for g in gaps] == [("click", "ref", "unobtainable_argument")]


def test_i12_an_object_of_undeclared_members_cannot_be_stated_by_a_user():
    blob = tool("import_session", {"session": {"type": "object"}})
    declared = tool(
        "move_to", {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}
    )
    tools = {t.name: t for t in (blob, declared)}
    assert [g.argument for g in argument_gaps(["import_session"], tools)] == ["session"]
    assert argument_gaps(["move_to"], tools) == []


def test_an_unknown_tool_of_a_chain_is_a_gap():
    assert [str(g) for g in argument_gaps(["ghost"], {})] == ["unknown_tool: ghost"]
