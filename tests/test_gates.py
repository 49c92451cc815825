"""Each gate on environments that break one thing, and on sound ones that come near to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gate_cases import (
    FEE,
    HALL,
    LEVEL,
    STOCK,
    TICKETS,
    abstain,
    broken,
    garden,
    museum,
    row,
    schema,
    sealed,
    shop,
)

from astrolabe.envs.gates.check import _Out, check_environments, check_file
from astrolabe.envs.gates.determinism import hash_seeds
from astrolabe.envs.gates.gate import gate_environment, gate_tool
from astrolabe.envs.gates.leak import Text
from astrolabe.envs.gates.literals import code_literals, siblings
from astrolabe.envs.gates.worker import gate_line
from astrolabe.envs.sandbox import Sandbox
from astrolabe.records.environment import Environment, EnvTool, Golden, environment_id
from astrolabe.records.errors import RunError, UsageError

Row = dict[str, Any]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=1) as box:
        yield box


@pytest.mark.parametrize("base", [museum, garden, shop, abstain])
def test_sound_environments_pass_with_a_certificate(base: Any, sandbox: Sandbox) -> None:
    report = gate_environment(base(), sandbox)
    assert report.feedback() == ""
    certificate = report.certificate
    assert certificate is not None
    assert certificate.ceiling == 1.0
    assert certificate.leaks == 0
    assert certificate.hash_seeds[:2] == [0, 1]
    assert len(set(certificate.hash_seeds)) == 4
    assert certificate.floor.random <= 0.34
    assert len(certificate.transcript_sha256) == 64
    assert report.environment is not None
    assert report.environment.content_id() == base()["id"]


def set_code(tool: int, code: str) -> Any:
    return lambda env: env["tools"][tool].update(code=code)


def set_tool(tool: int, **fields: Any) -> Any:
    return lambda env: env["tools"][tool].update(fields)


def set_golden(golden: int, **fields: Any) -> Any:
    return lambda env: env["goldens"][golden].update(fields)


def set_node(node: int, **fields: Any) -> Any:
    return lambda env: env["nodes"][node].update(fields)


def set_row(**fields: Any) -> Any:
    return lambda env: env.update(fields)


def distractor(code: str, name: str = "hall_of", parameters: Any = None) -> Any:
    fields = {"name": name, "code": code, **({"parameters": parameters} if parameters else {})}
    return lambda env: env["distractors"][0].update(fields)


ROBOT = """def rest(seconds, *, state):
    state["battery"] = min(100, state["battery"] + seconds)
    return {"status": "rested"}
"""
MOVE = """def move(steps, *, state):
    if steps < 1 or steps * 30 > state["battery"]:
        raise ToolError("battery too low")
    state["battery"] -= steps * 30
    state["place"] += steps
    return {"place": state["place"] + 1000}
"""


def robot() -> Row:
    """Two writes that only work in one order, with no edge that says so."""
    return row(
        question="Let the robot rest for 55 and go 3 steps.", answer="1003", scenario="parallel_single_hop", mode="stateful",
        nodes=[
            {"id": "n1", "question": "Rest.", "answer": {"status": "rested"}, "parents": [], "tool": "rest"},
            {"id": "n2", "question": "Go.", "answer": 1003, "parents": [], "tool": "move", "path": "$.place"},
        ],
        tools=[
            {"name": "rest", "description": "Charges.", "parameters": schema({"seconds": "integer"}), "code": ROBOT},
            {"name": "move", "description": "Goes.", "parameters": schema({"steps": "integer"}), "code": MOVE},
        ],
        goldens=[
            {"node": "n1", "tool": "rest", "arguments": {"seconds": 55}, "returns": {"status": "rested"}},
            {"node": "n2", "tool": "move", "arguments": {"steps": 3}, "returns": {"place": 1003}},
        ],
        state={"battery": 40, "place": 0}, goal={"state": {"battery": 5, "place": 3}},
    )  # fmt: skip


def chain() -> Row:
    """A first value too short to be a secret, that the second call needs."""
    base = shop()
    del base["nodes"][0], base["goldens"][0]
    base["nodes"][1].update(answer=16, parents=["n2"])
    base["goldens"][1].update(arguments={"a": 36, "b": 20}, returns=16)
    return sealed({**base, "question": "南门店的米再减20袋剩多少？", "answer": "16", "scenario": "multi_hop"})


COUNTER = """CALLS = []
def difference(a, b):
    CALLS.append(1)
    return a - b + len(CALLS) - 1
"""
SET_ORDER = STOCK.replace("[item]\n", '[item] + list({"a", "b", "c", "d", "e", "f"}).index("a")\n')
IN_CODE = TICKETS.replace(
    '    return data["tickets"][visitor]',
    '    return {"Ada Quist": "TK7730", "Bo Lind": "TK2214"}.get(visitor, "TK0000")',
)

BROKEN: dict[str, tuple[Any, Any, set[str]]] = {
    "a field left out": (museum, lambda env: env.pop("goal"), {"schema_invalid"}),
    "a field too many": (museum, set_row(colour="red"), {"schema_invalid"}),
    "a number as text": (museum, lambda env: env["distractors"][0].update(similarity="0.9"), {"schema_invalid"}),
    "an unknown scenario": (museum, set_row(scenario="two_hop"), {"schema_invalid"}),
    "parameters that are no schema": (museum, set_tool(0, parameters={"type": "object", "properties": {"visitor": {"type": "text"}}}), {"schema_invalid"}),
    "two nodes of one id": (museum, set_node(1, id="n1", parents=[]), {"schema_invalid"}),
    "a path that is none": (museum, set_node(0, path="$["), {"schema_invalid"}),
    "stateful without state": (garden, set_row(state=None), {"schema_invalid"}),
    "distractor named as a tool": (museum, distractor(TICKETS, "find_ticket", schema({"visitor": "string"})), {"duplicate_tool_name"}),
    "no licence": (museum, set_row(provenance={"source": "x"}), {"license_missing"}),
    "a cycle": (museum, set_node(0, parents=["n2"]), {"cyclic_graph"}),
    "a parent that is not there": (museum, set_node(1, parents=["n1", "n9"]), {"missing_parent"}),
    "a node whose tool is not there": (museum, lambda env: env["tools"].pop(1), {"target_without_tool"}),
    "a node without golden": (museum, lambda env: env["goldens"].pop(0), {"target_without_tool"}),
    "two goldens for a node": (museum, lambda env: env["goldens"].append(dict(env["goldens"][0])), {"target_without_tool"}),
    "two hops called one": (museum, set_row(scenario="single_hop"), {"scenario_mismatch"}),
    "parallel called serial": (shop, set_row(scenario="multi_hop"), {"scenario_mismatch"}),
    "asks though it can answer": (museum, set_row(expect="ask"), {"scenario_mismatch"}),
    "another answer": (museum, set_row(answer="127"), {"answer_mismatch"}),
    "another node answer": (museum, set_node(0, answer="TK2214"), {"answer_mismatch"}),
    "a path to nowhere": (garden, set_node(0, path="$.sink"), {"answer_mismatch"}),
    "an argument from nowhere": (museum, lambda env: (set_golden(1, arguments={"ticket": "TK2214", "hours": 4}, returns=116)(env), set_node(1, answer=116)(env), env.update(answer="116")), {"edge_not_live"}),
    "an edge that nothing needs": (garden, lambda env: (env["goldens"].reverse(), set_code(1, LEVEL.replace('state["tank"]', "415"))(env)), {"edge_not_live"}),
    "a text for a number": (museum, set_golden(1, arguments={"ticket": "TK7730", "hours": "4"}), {"golden_argument_invalid"}),
    "a boolean for an integer": (museum, set_golden(1, arguments={"ticket": "TK7730", "hours": True}), {"golden_argument_invalid"}),
    "an unknown argument": (museum, set_golden(1, arguments={"ticket": "TK7730", "hours": 4, "tip": 1}), {"golden_argument_invalid"}),
    "a parameter the schema lacks": (museum, set_code(1, FEE.replace("hours,", "hours, tip=0,")), {"signature_mismatch"}),
    "an optional one without default": (museum, set_tool(1, parameters=schema({"ticket": "string"}, {"hours": "integer"})), {"signature_mismatch"}),
    "a clock": (museum, set_code(0, "import time\n" + TICKETS), {"unsafe_code"}),
    "eval in a distractor": (museum, distractor(HALL.replace("halls =", "eval('1')\n    halls =")), {"unsafe_code"}),
    "a golden that raises": (museum, set_code(0, TICKETS.replace('not in data["tickets"]', 'not in ("Bo Lind", "Cy Moe")')), {"golden_raises"}),
    "a golden that is not its value": (museum, lambda env: (set_golden(1, returns=171)(env), set_node(1, answer=171)(env), env.update(answer="171")), {"golden_mismatch"}),
    "the order of a set": (shop, set_code(0, SET_ORDER), {"golden_mismatch", "nondeterministic"}),
    "an order that no edge asks for": (robot, lambda env: None, {"order_dependent"}),
    "one value for all": (shop, set_code(1, "def difference(a, b):\n    return 204\n"), {"constant_tool"}),
    "an argument that is ignored": (shop, set_code(0, STOCK.replace("table[shop][item]", 'table[shop]["米"]').replace(" or item not in table[shop]", "")), {"mutant_survived"}),
    "an optional argument that is ignored": (museum, set_tool(1, code=FEE.replace("hours,", "hours, gift=False,"), parameters=schema({"ticket": "string", "hours": "integer"}, {"gift": "boolean"})), {"mutant_survived"}),
    "only the golden is known": (museum, set_code(0, TICKETS.replace('visitor not in data["tickets"]', 'visitor != "Ada Quist"')), {"degenerate_tool"}),
    "the answer in a description": (museum, set_tool(0, description="Finds the ticket, such as TK7730."), {"answer_leak"}),
    "the answer in a schema": (museum, set_tool(1, parameters={**schema({"ticket": "string", "hours": "integer"}), "description": "costs 172"}), {"answer_leak"}),
    "the answer in a docstring": (museum, set_code(1, FEE.replace("data):\n", 'data):\n    """Gives 172."""\n')), {"answer_leak"}),
    "the answer in the question": (museum, set_row(question="What does Ada Quist (ticket tk7730) pay for a guide of 4 hours?"), {"answer_leak", "floor_violation"}),
    "the answer in another tool's error": (museum, set_code(0, TICKETS.replace('"no ticket for this visitor"', '"no ticket; a guide is 172"')), set()),
    "a distractor that answers": (museum, distractor(HALL.replace('"cellar"', "172")), {"distractor_hit"}),
    "a distractor's error that answers": (museum, distractor(HALL.replace('"no hall"', '"no hall; a guide is 172"')), {"answer_leak"}),
    "a goal that the goldens miss": (garden, set_row(goal={"state": {"tank": 400}}), {"ceiling_violation"}),
    "a goal that holds from the start": (garden, set_row(goal={"must": [{"path": "$.beds.leeks", "equals": 0}]}), {"floor_violation"}),
    "everything said in the question": (chain, lambda env: env.update(question="南门店的米是36袋，再减20袋剩多少？"), {"floor_violation"}),
    "an argument that only a call can tell": (chain, lambda env: None, set()),
    "values of data that stand in the code": (museum, set_code(0, IN_CODE), {"hard_coded"}),
    "no data though it is in the code": (museum, set_code(0, 'def find_ticket(visitor):\n    known = {"Ada Quist": "TK7730", "Bo Lind": "TK2214"}\n    if visitor not in known:\n        raise ToolError("none")\n    return known[visitor]\n'), {"hard_coded"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_one_broken_thing_is_named_and_nothing_else(name: str, sandbox: Sandbox) -> None:
    base, change, reasons = BROKEN[name]
    report = gate_environment(broken(base, change), sandbox)
    assert set(report.reasons) == reasons, report.feedback()
    assert (report.verdict == "fail") == bool(reasons)
    assert (report.certificate is None) == bool(reasons)
    assert all(set(item) == {"reason", "node", "tool", "text"} and item["text"] for item in report.detail)


def test_a_counter_kept_in_the_process_is_nondeterministic(sandbox: Sandbox) -> None:
    tool = EnvTool(name="difference", description="", parameters=schema({"a": "number", "b": "number"}), code=COUNTER)
    findings = gate_tool(
        tool, [Golden(node="n", tool="difference", arguments={"a": 9, "b": 2}, returns=7)], None, sandbox
    )
    assert {f.reason for f in findings} <= {"nondeterministic", "unsafe_code"}
    assert findings


def test_an_endless_loop_is_a_timeout_and_does_not_stop_the_other_tools(sandbox: Sandbox) -> None:
    def change(env: Row) -> None:
        env["tools"][0]["code"] = "def find_ticket(visitor):\n    while True:\n        pass\n"
        env["tools"][1]["description"] = "Fee of a guide, often 172."

    assert gate_environment(broken(museum, change), sandbox).reasons == ["timeout", "answer_leak"]


def test_the_row_is_never_trusted_to_be_a_row(sandbox: Sandbox) -> None:
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    for strange in (
        None,
        3,
        [],
        {},
        {"id": 4},
        {**museum(), "nodes": None},
        {**museum(), "data": {"x": deep}},
        {**museum(), "\ud800": 1},
    ):
        assert "schema_invalid" in gate_environment(strange, sandbox).reasons


@pytest.mark.parametrize(
    "property_schema",
    [{"$ref": "https://example.org/schema.json"}, {"$ref": "#/$defs/none"}, {"type": "string", "pattern": "("}],
)
def test_a_schema_must_stand_on_its_own(property_schema: Row, sandbox: Sandbox) -> None:
    parameters = {"type": "object", "properties": {"visitor": property_schema}, "required": ["visitor"]}
    assert gate_environment(broken(museum, set_tool(0, parameters=parameters)), sandbox).reasons == ["schema_invalid"]


def test_a_schema_may_refer_to_its_own_definitions(sandbox: Sandbox) -> None:
    parameters = {
        "type": "object",
        "properties": {"visitor": {"$ref": "#/definitions/name"}},
        "required": ["visitor"],
        "definitions": {"name": {"type": "string"}},
    }
    assert gate_environment(broken(museum, set_tool(0, parameters=parameters)), sandbox).feedback() == ""


COMPARE = """def busier(first, second, *, data):
    halls = data["halls"]
    if first not in halls or second not in halls:
        raise ToolError("no such hall")
    return first if halls[first] > halls[second] else second
"""


def compare() -> Row:
    """A golden that no small change of data moves: only its order matters."""
    return row(
        question="Which of the halls Alder and Birch is busier?", answer="Birch", answer_type="span",
        nodes=[{"id": "n1", "question": "", "answer": "Birch", "parents": [], "tool": "busier"}],
        tools=[{"name": "busier", "description": "The busier hall.", "parameters": schema({"first": "string", "second": "string"}), "code": COMPARE}],
        goldens=[{"node": "n1", "tool": "busier", "arguments": {"first": "Alder", "second": "Birch"}, "returns": "Birch"}],
        data={"halls": {"Alder": 120, "Birch": 900, "Cedar": 40, "Dogwood": 700, "Elm": 15}},
    )  # fmt: skip


def test_a_choice_among_what_the_call_names_is_no_leak_and_not_hard_coded(sandbox: Sandbox) -> None:
    assert gate_environment(compare(), sandbox).feedback() == ""
    by_heart = COMPARE.replace("return first if", 'return "Birch" if second == "Birch" else first if')
    assert "hard_coded" in gate_environment(broken(compare, set_code(0, by_heart)), sandbox).reasons


def test_an_id_must_be_the_hash_of_the_content(sandbox: Sandbox) -> None:
    env = {**museum(), "domain": "zoo"}
    assert gate_environment(env, sandbox).reasons == ["id_mismatch"]


def test_reports_come_in_the_order_of_the_rows_whatever_the_workers(sandbox: Sandbox) -> None:
    rows = [museum(), {**museum(), "domain": "zoo"}, abstain(), {}]
    one = [r.to_json() for r in check_environments(rows, sandbox)]
    assert [r.to_json() for r in check_environments(rows, sandbox, workers=3)] == one
    assert [r["verdict"] for r in one] == ["pass", "fail", "pass", "fail"]


def test_feedback_gives_the_failing_case(sandbox: Sandbox) -> None:
    report = gate_environment(broken(museum, set_golden(1, returns=171)), sandbox)
    assert 'guide_fee({"hours":4,"ticket":"TK7730"}) gives 172, the golden says 171' in report.feedback()


def test_a_tool_is_gated_before_its_environment_exists(sandbox: Sandbox) -> None:
    env = Environment.from_json(museum())
    fee, golden = env.tools[1], env.goldens[1]
    assert gate_tool(fee, [golden], env.data, sandbox, question=env.question) == []
    constant = fee.model_copy(update={"code": "def guide_fee(ticket, hours):\n    return 172\n"})
    reasons = {finding.reason for finding in gate_tool(constant, [golden], env.data, sandbox)}
    assert reasons == {"constant_tool"}
    stateful = Environment.from_json(garden())
    assert gate_tool(stateful.tools[0], [stateful.goldens[0]], None, sandbox, state=stateful.state) == []


def test_hash_seeds_come_from_the_id_and_differ() -> None:
    for i in range(200):
        seeds = hash_seeds(f"env-{i}")
        assert len(set(seeds)) == 4
        assert seeds == hash_seeds(f"env-{i}")


@pytest.mark.parametrize(
    ("text", "value", "held"),
    [
        ("for example 105.", 105, True), ("1,050 or so", 1050, True), ("105.0", 105, True), ("BK105", 105, False), ("1055", 105, False),
        ("共217元", 217, True), ("code BK4471!", "BK4471", True), ("XBK4471", "BK4471", False), ("bk4471", "BK4471", True),
        ("Blue sky", "Blue", True), ("bluebell", "blue", False), ("去西门店吧", "西门店", True), ("-3.95 %", -3.95, True), ("3.95", -3.95, False),
    ],
)  # fmt: skip
def test_leaks_are_looked_for_on_token_borders(text: str, value: Any, held: bool) -> None:
    assert Text(text).holds(value) is held


def test_siblings_of_a_golden_argument_are_found_where_it_stands() -> None:
    code = 'T = {("a1", 2): "x", ("b1", 3): "y"}\nR = [{"who": "a1", "n": 1}, {"who": "c1", "n": 2}]\n'
    found = [s for literal in code_literals(code) for s in siblings(literal, "a1")]
    assert {"b1", "c1"} <= set(found)


# The command's library function


def written(folder: Path, lines: list[str]) -> Path:
    path = folder / "environments.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_check_file_ships_what_passes_as_it_stood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = museum()
    path = written(
        tmp_path, [json.dumps(good, ensure_ascii=False), "not json", json.dumps(broken(shop, set_row(answer="1")))]
    )
    assert check_file(path, tmp_path / "out", json_lines=True, workers=1) == 1
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["verdict"] for r in replies] == ["pass", "fail", "fail"]
    assert [r["reasons"] for r in replies] == [[], ["schema_invalid"], ["answer_mismatch"]]
    assert all(list(r) == ["id", "verdict", "reasons", "detail"] for r in replies)
    (line,) = (tmp_path / "out" / "environments.jsonl").read_text(encoding="utf-8").splitlines()
    shipped = json.loads(line)
    assert {**shipped, "certificate": None} == good
    assert environment_id(shipped) == good["id"]
    assert shipped["certificate"]["checked_with"].startswith("astrolabe ")
    assert set(shipped["certificate"]["support"]) == {"find_ticket", "guide_fee", "hall_of"}
    # What was shipped passes again: the certificate is no part of what is checked.
    assert check_file(tmp_path / "out" / "environments.jsonl", None, workers=1) == 0


def test_check_file_refuses_what_is_no_file_of_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        check_file(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="no rows"):
        check_file(written(tmp_path, []))
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="not UTF-8"):
        check_file(tmp_path / "latin.jsonl")
    with pytest.raises(UsageError, match="unknown form"):
        check_file(written(tmp_path, ["{}"]), source="csv")


def test_astra_rl_rows_are_gated_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = {"name": "stock", "description": "Stock of a shop.", "parameters": schema({"shop": "string"})}
    astra = {
        "prompt": [{"role": "user", "content": "How many pears does the west shop have?"}],
        "tool_schema": json.dumps([{"type": "function", "function": function}] * 2),
        "tool_dict": json.dumps({"stock": "import os\ndef stock(shop):\n    return 'Pears: 3100'\n"}),
        "sub_qa_dict": json.dumps({"stock": ["Pears: 3100"]}),
    }
    assert check_file(written(tmp_path, [json.dumps(astra)]), json_lines=True, source="astra-rl", workers=1) == 1
    reasons = json.loads(capsys.readouterr().out)["reasons"]
    assert reasons == ["duplicate_tool_name", "golden_argument_invalid", "unsafe_code"]
    with pytest.raises(UsageError, match="line 1: no ASTRA-RL row"):
        check_file(written(tmp_path, ["{}"]), source="astra-rl")


def test_check_file_overwrites_neither_a_run_nor_what_it_checks(tmp_path: Path) -> None:
    path = written(tmp_path, ["{}"])
    with pytest.raises(UsageError, match="holds the file that is checked"):
        check_file(path, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "environments.jsonl").write_text("of the run\n")
    with pytest.raises(UsageError, match="holds a run"):
        check_file(path, tmp_path / "run")
    assert path.read_text() == "{}\n"
    assert (tmp_path / "run" / "environments.jsonl").read_text() == "of the run\n"


def test_check_file_on_a_full_disk_is_an_error_with_a_mend(tmp_path: Path) -> None:
    (tmp_path / ".environments.jsonl.part").symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left") as caught, _Out(tmp_path) as out:
        out._file.write("a row")  # buffered: the disk is full only when the file is closed
    assert "free some space" in caught.value.mend
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ['{"a": 1e999}', '{"a": "\\ud800"}', "[" * 200_000], ids=["inf", "surrogate", "deep"])
def test_a_line_that_could_not_be_written_again_fails_its_row(line: str, sandbox: Sandbox) -> None:
    report = gate_line(line.encode(), 3, sandbox)["report"]
    assert (report["verdict"], report["reasons"]) == ("fail", ["schema_invalid"])
    assert "line 3 is not JSON" in report["detail"][0]["text"]
