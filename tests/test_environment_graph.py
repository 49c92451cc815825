"""From knowledge to certified environments: what is accepted, what is rejected and why, and that a seed repeats it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langgraph.runtime import Runtime

from agents.decomposer import NodeDraft, ToolDoc
from agents.teacher.make_knowledge import FOLDER
from agents.verifier import JUDGES
from astrolabe.records.base import Usage
from astrolabe.records.environment import Environment, EnvTool
from astrolabe.records.errors import UsageError
from astrolabe.records.jsonl import read_rows
from graphs.env_drafts import scenario_of, structure_faults
from graphs.env_tools import compatible, merge_data, rename
from graphs.environment import build, graph, read_samples, synthesise_environments
from graphs.environment_context import EnvironmentContext
from graphs.environment_graph import kind_of, verify
from graphs.options import SynthOptions
from serving.chat import ChatReply

OPTIONS = {"seed": 5, "defect_rate": 0.3}


def rows_of(path: Path) -> list[Any]:
    return [row for _, row in read_rows(path)] if path.stat().st_size else []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over three rows of the project's knowledge and two lines that are none."""
    folder = tmp_path_factory.mktemp("environments")
    lines = [
        (FOLDER / f"{lang}.jsonl").read_text(encoding="utf-8").splitlines()[n]
        for lang, n in (("en", 1), ("zh", 0), ("en", 26))
    ]
    (folder / "knowledge.jsonl").write_text("\n".join([*lines, "{", '{"domain":"x"}']) + "\n", encoding="utf-8")
    code = synthesise_environments(
        folder / "knowledge.jsonl", folder / "a", SynthOptions(**OPTIONS, labels=folder / "labels.jsonl")
    )
    assert code == 3
    return folder / "a"


def test_accepted_environments_are_whole_records_with_a_certificate(run: Path):
    rows = rows_of(run / "environments.jsonl")
    assert len(rows) >= 3
    for row in rows:
        env = Environment.from_json(row)
        assert env.id == env.content_id()
        assert env.certificate is not None
        assert env.certificate.ceiling == 1
        assert env.provenance["models"] == {"decomposer": "astrolabe-teacher", "verifier": "astrolabe-teacher"}
        assert env.provenance["license"]
        assert {"high", "medium", "low"} >= {d.band for d in env.distractors}
    assert {row["language"] for row in rows} == {"en", "zh"}


def test_lines_that_are_no_knowledge_are_rejected_rows_with_their_place(run: Path):
    bad = [row for row in rows_of(run / "rejected.jsonl") if row["stage"] == "collect"]
    assert [row["reasons"] for row in bad] == [["not_knowledge"], ["not_knowledge"]]
    assert "line 4" in bad[0]["detail"]
    assert "line 5" in bad[1]["detail"]


def test_no_line_of_knowledge_ends_the_run(tmp_path: Path):
    lines = [json.dumps({"domain": "d", "text": "half \ud800"}), "[" * 200_000, '{"domain": "d", "text": NaN}']
    (tmp_path / "knowledge.jsonl").write_text("\n".join(lines) + "\n")
    assert synthesise_environments(tmp_path / "knowledge.jsonl", tmp_path / "run", SynthOptions()) == 3
    rejected = rows_of(tmp_path / "run" / "rejected.jsonl")
    assert [(row["reasons"], row["row"]) for row in rejected] == [(["not_knowledge"], {"line": line}) for line in lines]


def test_every_stage_of_the_funnel_adds_up(run: Path):
    stages = {row["stage"]: row for row in json.loads((run / "funnel.json").read_text())}
    for row in stages.values():
        assert row["in"] == row["out"] + sum(row["rejected"].values()), row
    assert stages["export"]["out"] == len(rows_of(run / "environments.jsonl"))
    assert stages["collect"]["out"] == stages["decompose"]["in"]


def test_a_tool_that_fails_its_gates_is_kept_as_a_rejected_attempt_and_written_again(run: Path):
    rejected = rows_of(run / "rejected.jsonl")
    attempts = [row for row in rejected if row["stage"] == "tool_gates"]
    assert attempts
    assert all(row["reasons"] and row["detail"] and row["row"]["tool"]["code"] for row in attempts)
    ended = {row["item"] for row in rejected if row["stage"] != "tool_gates"}
    assert any(row["item"] not in ended for row in attempts), "no attempt was mended"


def test_no_decomposition_with_a_planted_defect_and_no_refused_tool_is_accepted(run: Path):
    codes = {row["row"]["tool"]["code"] for row in rows_of(run / "rejected.jsonl") if row["stage"] == "tool_gates"}
    for row in rows_of(run / "environments.jsonl"):
        assert not {tool["code"] for tool in row["tools"] if "For example, it gave" not in tool["description"]} & {
            code for code in codes if "while True" in code or "import" in code
        }


def test_a_replay_needs_no_server_and_gives_equal_files(run: Path, tmp_path: Path):
    options = SynthOptions(**OPTIONS, replay=run)
    assert synthesise_environments(run.parent / "knowledge.jsonl", tmp_path / "again", options) == 3
    for name in ("environments.jsonl", "rejected.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes()


def test_a_missing_file_is_an_error_with_a_mend(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        synthesise_environments(tmp_path / "none.jsonl", tmp_path / "run", SynthOptions())


def test_the_own_knowledge_is_at_least_a_quarter_chinese_and_every_key_is_unique():
    items = read_samples(None)
    assert len({item.key for item in items}) == len(items) >= 400
    chinese = sum(item.value.row is not None and item.value.row.language == "zh" for item in items)
    assert chinese * 4 >= len(items)
    first = [item.value.row.language for item in items[:12] if item.value.row is not None]
    assert first.count("zh") == 4


def test_shares_of_kinds_are_those_of_the_context():
    ctx = EnvironmentContext(no_tool_share=0.2, missing_parameter_share=0.1, stateful_share=0.0)
    kinds = [kind_of(ctx, seed) for seed in range(2000)]
    assert 0.16 < kinds.count("no_tool") / 2000 < 0.24
    assert 0.07 < kinds.count("missing_parameter") / 2000 < 0.13
    assert "stateful" not in kinds


def test_the_graph_compiles_with_another_context():
    assert build(EnvironmentContext) is not None
    assert {"decompose", "structure", "verify", "tools", "assemble", "certify"} <= set(graph.get_graph().nodes)


# -- structure ---------------------------------------------------------------------------------------------------------


def node(name: str, *parents: str, tool: bool = True) -> NodeDraft:
    return NodeDraft(id=name, question=f"What is {name}?", answer=1, parents=list(parents), needs_tool=tool)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([node("a", "b"), node("b", "a")], "cyclic_graph"),
        ([node("a", "z")], "missing_parent"),
        ([node("a"), node("b", "a", "a")], "missing_parent"),
        ([node("a", tool=False), node("b", "a")], "toolless_parent"),
        ([node("a"), node("a")], "duplicate_node_id"),
        ([node("a", tool=False)], "hops_out_of_range"),
        ([node("a"), *[node(f"n{i}", f"n{i - 1}" if i else "a") for i in range(5)]], "hops_out_of_range"),
    ],
)
def test_a_faulty_graph_is_refused_in_code_before_any_judge(nodes, reason):
    assert reason in [found for found, _ in structure_faults(nodes, 1, 5)]


def test_scenarios_follow_hops_and_width():
    assert scenario_of([node("a")]) == "single_hop"
    assert scenario_of([node("a"), node("b", "a")]) == "multi_hop"
    assert scenario_of([node("a"), node("b"), node("c", "a", "b", tool=False)]) == "parallel_single_hop"
    assert scenario_of([node("a"), node("b"), node("c", "a", "b")]) == "parallel_multi_hop"


# -- judges fail closed ------------------------------------------------------------------------------------------------


class Scripted:
    """A client that says one thing for ever."""

    def __init__(self, line: str) -> None:
        self.line = line

    async def complete(self, messages: Any, **options: Any) -> ChatReply:
        return ChatReply(self.line, None, [], "stop", Usage(calls=1), "scripted", "key")


def state() -> dict[str, Any]:
    from agents.decomposer import DecomposeReply
    from astrolabe.records.card import KnowledgeRow

    draft = DecomposeReply(
        question="q", answer="1", answer_type="number", nodes=[node("a"), node("b", "a")], state=None, goal=None
    )
    row = KnowledgeRow(domain="d", text="t", language="en")
    return {"draft": draft, "knowledge": row, "seed": 1, "kind": "answer", "key": "k", "variation": 0}


@pytest.mark.parametrize(
    "line",
    [
        "All good!",
        "{}",
        '{"items": []}',
        '{"items": [{"id": "a", "is_atomic": "true", "reason": ""}]}',
        '{"complete": "yes", "missing": [], "reason": ""}',
    ],
)
async def test_judges_without_a_valid_verdict_leave_a_sample_unjudged_and_so_rejected(line):
    ctx = EnvironmentContext(clients={"default": Scripted(line)}, max_repairs=1)
    out = await verify(state(), Runtime(context=ctx))  # type: ignore[arg-type]
    assert out["rejected"][0]["reasons"] == [f"{judge.name}_unjudged" for judge in JUDGES]
    assert all(counts == {"unjudged": 1} for counts in out["audit"].values())


async def test_a_judge_that_leaves_a_node_out_has_not_judged():
    line = '{"items": [{"id": "a", "is_atomic": true, "reason": "fine"}]}'
    ctx = EnvironmentContext(clients={"default": Scripted(line)}, max_repairs=0)
    out = await verify(state(), Runtime(context=ctx))  # type: ignore[arg-type]
    assert "atomicity_unjudged" in out["rejected"][0]["reasons"]


# -- tools -------------------------------------------------------------------------------------------------------------


def document(**properties: Any) -> ToolDoc:
    return ToolDoc(
        name="span", description="Span of a plane.",
        parameters={"type": "object", "properties": properties, "required": ["plane"]},
    )  # fmt: skip


def test_a_scaled_document_must_take_every_call_of_the_one_before():
    text = {"type": "string"}
    before = document(plane=text)
    assert compatible(before, document(plane=text, unit=text))
    assert not compatible(before, document(unit=text))
    assert not compatible(before, document(plane={"type": "integer"}))
    needy = document(plane=text, unit=text)
    needy.parameters["required"] = ["plane", "unit"]
    assert not compatible(before, needy)


def test_renaming_a_tool_leaves_text_in_quotes_alone():
    code = 'def span(plane, *, data):\n    table = data["span"]\n    return table[plane] if plane else span("x", data=data)\n'
    tool = EnvTool(name="span", description="d", parameters={}, code=code)
    assert rename(tool, "reach").code == code.replace("def span", "def reach").replace(
        'else span("x"', 'else reach("x"'
    )


def test_tables_that_disagree_are_a_conflict():
    data, clashes = merge_data([{"a": {"x": 1}}, {"a": {"x": 1}, "b": {}}, {"a": {"x": 2}}])
    assert data == {"a": {"x": 1}, "b": {}}
    assert clashes == ["a"]


@pytest.mark.slow
def test_gates_and_judges_find_what_was_planted_and_nothing_else(tmp_path: Path):
    from benchmarks.defects_environments import score

    labels = tmp_path / "labels.jsonl"
    options = SynthOptions(limit=10, seed=2, defect_rate=0.6, labels=labels)
    synthesise_environments(None, tmp_path / "run", options)
    scores = score(tmp_path / "run", labels)
    assert sum(s.found for s in scores.values()) >= 5
    assert all(s.good for s in scores.values()), scores
