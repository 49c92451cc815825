"""From server cards to judged trajectories: what is accepted, what is rejected and why, and that a seed repeats it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from langgraph.runtime import Runtime

from agents.teacher.planter import question_item
from agents.teacher.server import create_app
from astrolabe.records.base import Usage
from astrolabe.records.card import ServerCard, read_card
from astrolabe.records.errors import ServerError, UsageError
from astrolabe.records.jsonl import read_rows
from astrolabe.records.trajectory import JUDGES, Task, Trajectory, Verdict
from graphs import trajectory_graph, trajectory_tasks
from graphs.options import SynthOptions
from graphs.trajectory import read_cards, synthesise_trajectories
from graphs.trajectory_context import TrajectoryContext
from graphs.trajectory_rollout import decide, play
from graphs.trajectory_tasks import Draft
from serving.chat import ChatClient, ChatReply, ModelFailure, ModelSpec
from serving.http import launch_in_thread

TEXT = {"type": "string"}


def tool(name: str, description: str, required: dict[str, Any] | None = None, **optional: Any) -> dict[str, Any]:
    properties = {**(required or {}), **optional}
    schema = {"type": "object", "properties": properties, "required": list(required or {})}
    return {"name": name, "description": description, "parameters": schema}


HARBOUR = {
    "name": "harbour", "description": "Berths, boats and tides.", "domain": "Travel", "license": "MIT", "source": "own",
    "tools": [
        tool("list_berths", "List the berths of the harbour"),
        tool("reserve_berth", "Reserve a berth for a boat", {"berth_id": TEXT, "boat_name": TEXT}),
        tool("release_berth", "Release a berth that was reserved", {"berth_id": TEXT}),
        tool("get_tide_table", "Get the tide table of a day", {"date": TEXT}, unit={"type": "string", "enum": ["m", "ft"]}),
        tool("convert_depth", "Convert a depth between units", {"depth": {"type": "number", "minimum": 0, "maximum": 90}}),
    ],
}  # fmt: skip
LIBRARY = {
    "name": "library", "description": "A lending library.", "domain": "Books", "license": "Apache-2.0", "source": "own",
    "tools": [
        tool("search_books", "Search the books of the library", {"query": TEXT}, limit={"type": "integer", "minimum": 1, "maximum": 5}),
        tool("get_book", "Get the record of one book", {"book_id": TEXT}),
        tool("renew_loan", "Renew the loan of a book", {"book_id": TEXT}, weeks={"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        tool("x", "too short"),
    ],
}  # fmt: skip
MARKET = {
    "name": "集市", "description": "集市摊位与水果价格查询。", "domain": "购物", "license": "MIT", "source": "own",
    "tools": [
        tool("list_stalls", "列出集市里的全部摊位信息"),
        tool("find_fruit_price", "查询一种水果今天的价格", {"fruit_name": {"type": "string", "description": "水果名称，例如“苹果”、“梨”"}}),
        tool("rent_stall", "租用一个集市里的空闲摊位", {"stall_id": TEXT}),
    ],
}  # fmt: skip
NO_LICENCE = {**HARBOUR, "name": "unlicensed", "license": " "}
FILES = ("trajectories.jsonl", "rejected.jsonl", "funnel.json", "judge_audit.json")


def write_cards(path: Path, *rows: Any) -> Path:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(text + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the same cards and seed, the second with another concurrency."""
    folder = tmp_path_factory.mktemp("runs")
    cards = write_cards(folder / "cards.jsonl", HARBOUR, "{broken", LIBRARY, NO_LICENCE, MARKET)
    for name, concurrency in (("a", 16), ("b", 2)):
        options = SynthOptions(seed=5, concurrency=concurrency, defect_rate=0.4, labels=folder / f"{name}.labels.jsonl")
        assert synthesise_trajectories(cards, folder / name, options) == 3, "an unusable line: partial"
    return folder / "a", folder / "b"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(path)]


def test_the_same_seed_gives_equal_files_whatever_the_concurrency(runs: tuple[Path, Path]):
    for name in FILES:
        assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes(), name


def test_what_is_accepted_finished_was_judged_and_made_valid_calls_only(runs: tuple[Path, Path]):
    rows = rows_of(runs[0] / "trajectories.jsonl")
    assert len(rows) >= 6
    assert {row["task"]["server"] for row in rows} == {"harbour", "library", "集市"}
    for row in rows:
        trajectory = Trajectory.from_json(row)
        assert trajectory.id == trajectory.content_id()
        assert trajectory.status == "finished"
        assert [v.judge for v in trajectory.verdicts] == list(JUDGES)
        assert {v.verdict for v in trajectory.verdicts} <= {"pass", "not_applicable"}
        assert trajectory.score is not None
        assert (trajectory.task.kind == "answer") == bool(trajectory.calls)
        schemas = {t.function.name: t.function.parameters for t in trajectory.tools}
        for call in trajectory.calls:
            jsonschema.validate(call.arguments, schemas[call.tool])
        made = [c for m in trajectory.messages for c in m.tool_calls or []]
        assert [c.id for c in made] == [c.id for c in trajectory.calls], "i6: ids are unique and agree end to end"
        assert len({c.id for c in made}) == len(made)


def test_provenance_names_the_teacher_the_licence_and_the_prompts(runs: tuple[Path, Path]):
    for row in rows_of(runs[0] / "trajectories.jsonl"):
        provenance = row["provenance"]
        assert set(provenance["models"].values()) == {"astrolabe-teacher"}
        assert {"planner", "policy", "judge"} <= set(provenance["models"])
        assert provenance["license"] in ("MIT", "Apache-2.0")
        assert provenance["seed"] == 5
        assert {"planner.chains", "judge.final_answer", "emulator", "policy"} <= set(provenance["prompts"])
        assert provenance["usage"]["calls"] > 3


def test_chinese_cards_give_chinese_trajectories(runs: tuple[Path, Path]):
    rows = [row for row in rows_of(runs[0] / "trajectories.jsonl") if row["task"]["server"] == "集市"]
    assert rows
    assert {row["language"] for row in rows} == {"zh"}
    assert all("\u4e00" <= row["messages"][-1]["content"][0] <= "\u9fff" for row in rows)


def test_bad_input_is_a_rejected_row_that_says_where_and_why(runs: tuple[Path, Path]):
    rejected = [row for row in rows_of(runs[0] / "rejected.jsonl") if row["stage"] == "collect"]
    by_reason = {row["reasons"][0]: row for row in rejected}
    assert "cards.jsonl, line 2" in by_reason["not_json"]["detail"]
    assert by_reason["license_missing"]["item"] == "unlicensed"
    assert by_reason["license_missing"]["row"]["name"] == "unlicensed"
    assert by_reason["vague_description"]["row"] == {"tool": "x"}, "a dropped tool has a row, its card goes on"


def test_every_stage_of_the_funnel_adds_up(runs: tuple[Path, Path]):
    funnel = json.loads((runs[0] / "funnel.json").read_text())
    stages = {row["stage"]: row for row in funnel}
    assert list(stages) == [
        "collect", "propose", "walk", "vote", "write", "augment", "verify", "score", "rollout", "judge", "export"
    ]  # fmt: skip
    for row in funnel:
        assert row["in"] == row["out"] + sum(row["rejected"].values()), row
    assert stages["collect"]["rejected"] == {"license_missing": 1, "not_json": 1}
    assert stages["verify"]["in"] == stages["write"]["out"] + stages["augment"]["out"]
    assert stages["export"]["out"] == len(rows_of(runs[0] / "trajectories.jsonl"))
    judged = Counter(row["stage"] for row in rows_of(runs[0] / "rejected.jsonl"))["judge"]
    assert judged == stages["judge"]["in"] - stages["judge"]["out"] > 0


def test_no_conversation_with_a_planted_defect_is_accepted(runs: tuple[Path, Path]):
    labels = rows_of(runs[0].parent / "a.labels.jsonl")
    planted = {label["item"] for label in labels if label["agent"] == "policy"}
    accepted = {question_item(row["task"]["question"]) for row in rows_of(runs[0] / "trajectories.jsonl")}
    assert len(planted) >= 3
    assert not planted & accepted


def test_injected_faults_are_marked_and_charged_to_nobody(runs: tuple[Path, Path]):
    rows = rows_of(runs[0] / "trajectories.jsonl")
    calls = [call for row in rows for call in row["calls"]]
    injected = [call for call in calls if call["injected"]]
    assert injected
    assert all(call["status"] == "error" and call["error"]["class"] in ("infra", "timeout") for call in injected)
    for row in rows:
        success = next(v for v in row["verdicts"] if v["judge"] == "tool_success")
        if any(call["injected"] for call in row["calls"]) and success["verdict"] != "not_applicable":
            counted = [call for call in row["calls"] if not call["injected"]]
            assert success["score"] == sum(call["status"] == "ok" for call in counted) / len(counted)


def test_the_same_command_on_a_finished_run_changes_nothing(runs: tuple[Path, Path]):
    before = {name: (runs[0] / name).read_bytes() for name in FILES}
    options = SynthOptions(seed=5, defect_rate=0.4)
    assert synthesise_trajectories(runs[0].parent / "cards.jsonl", runs[0], options) == 3
    assert before == {name: (runs[0] / name).read_bytes() for name in FILES}


def test_a_replay_needs_no_server_and_gives_equal_files(runs: tuple[Path, Path], tmp_path: Path):
    options = SynthOptions(seed=5, defect_rate=0.4, replay=runs[0])
    assert synthesise_trajectories(runs[0].parent / "cards.jsonl", tmp_path / "again", options) == 3
    for name in ("trajectories.jsonl", "rejected.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (runs[0] / name).read_bytes()


def test_cards_of_one_name_are_different_items(tmp_path: Path):
    path = write_cards(tmp_path / "cards.jsonl", HARBOUR, HARBOUR, [], {"name": 3})
    assert [item.key for item in read_cards(path)] == ["harbour", "harbour#2", "line 3", "line 4"]


def test_a_card_named_as_the_second_of_another_is_an_item_of_its_own(tmp_path: Path):
    names = ["x", "x#2", "x", "line 5"]
    path = write_cards(tmp_path / "cards.jsonl", *({**HARBOUR, "name": name} for name in names), [])
    assert [item.key for item in read_cards(path)] == ["x", "x#2", "x#3", "line 5", "line 5#2"]


def test_no_line_of_cards_ends_the_run(tmp_path: Path):
    lines = [
        json.dumps({"name": "n", "domain": float("nan")}),
        json.dumps({"name": "half \ud800"}),
        "[" * 200_000,
        '{"name": "n", "x": 1e999}',
        json.dumps({**HARBOUR, "source": 5}),
    ]
    (tmp_path / "cards.jsonl").write_text("\n".join(lines) + "\n")
    assert synthesise_trajectories(tmp_path / "cards.jsonl", tmp_path / "run", SynthOptions()) == 3
    rejected = rows_of(tmp_path / "run" / "rejected.jsonl")
    assert [row["reasons"] for row in rejected] == [["not_json"]] * 4 + [["schema_invalid"]]
    assert [row["row"].get("line") for row in rejected[:4]] == lines[:4]


def test_a_missing_file_and_a_dead_server_are_errors_with_a_mend(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        synthesise_trajectories(tmp_path / "nothing.jsonl", tmp_path / "run", SynthOptions())
    cards = write_cards(tmp_path / "cards.jsonl", HARBOUR)
    with pytest.raises(ServerError):
        synthesise_trajectories(cards, tmp_path / "run", SynthOptions(model_url="http://127.0.0.1:9", timeout_s=2))


def test_each_bad_card_of_the_shared_file_is_rejected_for_its_reason(shared: Path, tmp_path: Path):
    reasons = json.loads((shared / "data" / "mcp_servers_bad_reasons.json").read_text())
    assert synthesise_trajectories(shared / "data" / "mcp_servers_bad.jsonl", tmp_path / "run", SynthOptions()) == 3
    rejected = rows_of(tmp_path / "run" / "rejected.jsonl")
    assert len(rejected) == len(reasons)
    for row, reason in zip(rejected, reasons, strict=True):
        assert reason in row["reasons"]
    assert rows_of(tmp_path / "run" / "trajectories.jsonl") == []


# -- single stages -----------------------------------------------------------------------------------------------------


class Scripted:
    """A client that says one thing for ever."""

    def __init__(self, line: str | Exception) -> None:
        self.line = line

    async def complete(self, messages: Any, **options: Any) -> ChatReply:
        if isinstance(self.line, Exception):
            raise self.line
        return ChatReply(self.line, None, [], "stop", Usage(calls=1), "scripted", "key")


def card(row: dict[str, Any] = HARBOUR) -> ServerCard:
    found = read_card(row).card
    assert found is not None
    return found


def draft(**changes: Any) -> Draft:
    fields = {"question": "Please list the berths of the harbour.", "server": "harbour", "chain": ["list_berths"]}
    return Draft(Task(**{**fields, **changes}).with_id(), "en", "write")


def context(**clients: Any) -> TrajectoryContext:
    return TrajectoryContext(clients=clients, max_repairs=0, fault_rate=0.0)


async def test_j12_a_chain_without_a_quorum_never_becomes_a_task():
    ctx = context(default=Scripted('{"valid": false, "reason": "no"}'))
    state = {"card": card(), "key": "harbour", "seed": 1, "chains": [["list_berths", "reserve_berth"]]}
    update = await trajectory_graph.vote(state, Runtime(context=ctx))
    assert update["chains"] == []
    assert [row["reasons"] for row in update["rejected"]] == [["no_quorum"]]
    plans = trajectory_tasks.plan_tasks(card(), update["chains"], ctx, __import__("random").Random(0))
    assert all(plan.chain is None for plan in plans)


async def test_i9_an_original_stays_once_when_its_augmentation_fails():
    originals = [draft(), draft(question='Please get the tide table of a day, using date "2025-03-14".')]
    ctx = context(default=Scripted("no json"))
    ctx.augment_share = 1.0
    state = {"card": card(), "key": "harbour", "seed": 1, "drafts": originals}
    update = await trajectory_graph.augment(state, Runtime(context=ctx))
    assert update["drafts"] == originals
    assert [row["reasons"] for row in update["rejected"]] == [["invalid_reply"]] * 2


async def test_i13_a_task_that_reads_back_as_other_tools_is_rejected():
    ctx = context(default=Scripted('{"kind": "answer", "chain": ["get_tide_table"]}'))
    checked = await trajectory_tasks.verify(card(), draft(augmentation="diverse"), ctx, seed=1)
    assert checked.reasons == ("chain_mismatch",)


async def test_j11_a_rating_below_its_threshold_rejects_the_task():
    line = '{"question_quality": "fair", "scenario_realism": "good", "tool_necessity": "excellent"}'
    rated = await trajectory_tasks.rate(card(), draft(), context(default=Scripted(line)), seed=1)
    assert rated.reasons == ("low_question_quality",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": "Please call list_berths for me."}, "names_tool"),
        ({"chain": ["list_berths", "ghost"]}, "unknown_tool"),
        ({"chain": None}, "chain_mismatch"),
    ],
)
def test_i7_a_task_that_names_a_tool_or_needs_an_unknown_one_is_rejected(changes: dict[str, Any], reason: str):
    assert trajectory_tasks.check_text(draft(**changes), card(), None).reasons == (reason,)


@pytest.fixture(scope="module")
def teacher() -> Any:
    with launch_in_thread(create_app(defect_rate=0.0)) as server:
        yield server.url


def client(url: str) -> ChatClient:
    return ChatClient(ModelSpec(base_url=url, model="astrolabe-teacher"))


async def test_i4_a_rollout_that_the_server_broke_is_failed_and_never_judged():
    broken = context(default=Scripted(ModelFailure("timeout", "slow")))
    played = await play(card(), draft(), broken, {}, seed=1)
    assert played.trajectory.status == "failed"
    assert played.reasons == ("failed_model_timeout",)
    with pytest.raises(ServerError):
        await play(card(), draft(), context(default=Scripted(ModelFailure("unreachable", "gone"))), {}, seed=1)


async def test_i3_an_emulator_that_cannot_be_read_is_infra_and_no_call_of_the_policy(teacher: str):
    ctx = context(default=client(teacher), emulator=Scripted("the tool says hello"))
    played = await play(card(), draft(), ctx, {}, seed=1)
    assert played.trajectory.status == "failed"
    assert played.reasons == ("failed_tool_server_error",)
    assert [c.error.class_ for c in played.trajectory.calls if c.error] == ["infra"]


@pytest.mark.parametrize("line", ["It all looks splendid to me.", "[]", '{"score": 1.0}'])
async def test_j1_j2_a_judge_that_replies_prose_accepts_nothing(teacher: str, line: str):
    ctx = context(default=client(teacher), judge=Scripted(line))
    state = await trajectory_graph.graph.ainvoke({"row": HARBOUR}, context=ctx)
    assert state["played"]
    assert state["accepted"] == []
    judged = [row for row in state["rejected"] if row["stage"] == "judge"]
    assert len(judged) == len(state["played"])
    assert all(any(reason.startswith("unjudged_") for reason in row["reasons"]) for row in judged)
    assert all(row["row"]["score"] is None for row in judged)


async def test_the_graph_runs_alone_on_one_raw_card(teacher: str):
    state = await trajectory_graph.graph.ainvoke({"row": HARBOUR}, context=context(default=client(teacher)))
    assert state["accepted"]
    rejected = await trajectory_graph.graph.ainvoke({"row": NO_LICENCE}, context=TrajectoryContext())
    assert rejected["accepted"] == []
    assert rejected["rejected"][0]["reasons"] == ["license_missing"]


def verdicts(**changes: str) -> list[Verdict]:
    return [
        Verdict.model_validate(
            {"judge": name, "verdict": changes.get(name, "pass"), "score": 0.0 if changes.get(name) == "fail" else 1.0}
        )
        for name in JUDGES
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"verdicts": verdicts(tool_planning="fail")}, "failed_tool_planning"),
        ({"verdicts": verdicts(final_answer="unjudged")}, "unjudged_final_answer"),
        ({"verdicts": []}, "unjudged"),
        ({"score": 0.5}, "low_score"),
        ({"calls": []}, "no_call"),
    ],
)
def test_j7_the_decision_needs_every_judgement_a_call_and_the_score(change: dict[str, Any], reason: str):
    ok = {"id": "call_1", "turn": 0, "tool": "list_berths", "arguments": {}, "status": "ok", "backend": "emulator"}
    row = {
        "task": draft().task,
        "calls": [ok],
        "verdicts": verdicts(),
        "score": 1.0,
        "schema": "astrolabe.trajectory/1",
    }
    assert decide(Trajectory.model_validate(row), TrajectoryContext()) == []
    assert reason in decide(Trajectory.model_validate({**row, **change}), TrajectoryContext())
