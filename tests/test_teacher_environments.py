"""The teacher's environments without a model or a server: right by execution, without a leak, and played by its policy."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from typing import Any

import pytest

from agents.teacher.defects import CODE_DEFECTS, DECOMPOSITION_DEFECTS, break_code, break_decomposition
from agents.teacher.environment_policy import next_turn
from agents.teacher.environments import build_environments, demonstration, hops_of, mentions, node_question
from agents.teacher.planter import LabelSink, Planter
from agents.teacher.random_worlds import random_knowledge
from agents.teacher.registry import PROGRAMS, load
from agents.teacher.stateful import stateful_task
from agents.teacher.sub_questions import read_question
from agents.teacher.worlds import read_world
from astrolabe.envs.gates.gate import gate_tool
from astrolabe.envs.sandbox import Sandbox
from astrolabe.envs.static_rules import check_code
from astrolabe.records.environment import Environment
from astrolabe.records.equality import equal

QUIET = 0.0


class ToolError(Exception):
    pass


class Bench:
    """Runs the teacher's own tools in process (its code is ours)."""

    def __init__(self, env: Environment) -> None:
        self.names: dict[str, Any] = {"ToolError": ToolError}
        self.code = {tool.name: tool.code for tool in [*env.tools, *env.distractors]}
        for code in self.code.values():
            exec(code, self.names)
        self.data, self.state = env.data, copy.deepcopy(env.state)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        more = {key: getattr(self, key) for key in ("data", "state") if f"*, {key}" in self.code[name]}
        return self.names[name](**arguments, **more)


def planter(rate: float = QUIET, key: str = "k") -> Planter:
    return Planter(seed=0, rate=rate, key=key, agent="decomposer.decompose", sink=LabelSink())


def environments(count: int = 30) -> list[Environment]:
    out = []
    for seed in range(count):
        row = random_knowledge(random.Random(seed), "zh" if seed % 3 == 0 else "en")
        out += build_environments(row, random.Random(seed), 4)
    return out


ENVIRONMENTS = environments()


def test_every_golden_is_what_its_tools_code_returns():
    for env in ENVIRONMENTS:
        bench = Bench(env)
        for golden in env.goldens:
            assert equal(bench.call(golden.tool, golden.arguments), golden.returns)


def test_worlds_give_all_scenarios_and_one_to_five_hops():
    assert {env.scenario for env in ENVIRONMENTS} == {
        "single_hop", "multi_hop", "parallel_single_hop", "parallel_multi_hop", "no_tool", "missing_parameter",
    }  # fmt: skip
    assert {hops_of(env) for env in ENVIRONMENTS} >= {0, 1, 2, 3, 4}


def test_nothing_that_the_policy_sees_holds_a_golden_value():
    for env in ENVIRONMENTS:
        texts = [env.question, *(json.dumps(t.model_dump(), ensure_ascii=False) for t in env.policy_tools())]
        for golden in env.goldens:
            assert not any(mentions(text, golden.returns) for text in texts)


def test_texts_are_short_enough_for_a_small_policy():
    for env in ENVIRONMENTS:
        if env.language == "en":
            assert len(env.question.split()) <= 40
            assert all(len(t.description.split()) <= 12 for t in [*env.tools, *env.distractors])
        assert all(1 <= len(t.parameters["properties"]) <= 4 for t in env.tools)


def test_tool_code_keeps_the_static_rules():
    for env in ENVIRONMENTS[:40]:
        for tool in env.tools:
            assert check_code(tool.code, tool.name, tool.parameters) == []


def test_equal_seeds_give_equal_environments():
    row = random_knowledge(random.Random(3), "en")
    first = [e.to_line() for e in build_environments(row, random.Random(1), 4)]
    assert first == [e.to_line() for e in build_environments(row, random.Random(1), 4)]


def test_sub_questions_refer_to_as_many_answers_as_they_have_parents():
    for env in ENVIRONMENTS:
        for node in env.nodes:
            read = read_question(node.question, env.language)
            assert read is not None
            assert read.needs == len(node.parents)
    assert node_question is not None


def test_a_demonstration_without_redundancy_is_the_golden_calls_and_the_answer():
    for env in ENVIRONMENTS:
        turns = demonstration(env, random.Random(0), 0.0)
        calls = [call for turn in turns for call in turn.calls]
        assert calls == [(g.tool, g.arguments) for g in env.goldens]
        assert env.answer in turns[-1].content
        assert turns[-1].content


def test_redundant_demonstrations_hold_every_golden_and_up_to_three_more_calls_that_run():
    longer = 0
    for env in ENVIRONMENTS:
        calls = [call for turn in demonstration(env, random.Random(1), 1.0) for call in turn.calls]
        bench = Bench(env)
        for name, arguments in calls:
            bench.call(name, arguments)
        if env.goldens:
            assert all((g.tool, g.arguments) in calls for g in env.goldens)
            assert 1 <= len(calls) - len(env.goldens) <= 3
            longer += 1
        else:
            assert calls == []
    assert longer > 50


def play(env: Environment, rate: float = QUIET) -> tuple[list[dict[str, Any]], int]:
    """The teacher's policy on an environment: (messages, calls)."""
    bench, calls = Bench(env), 0
    tools = [tool.model_dump(mode="json") for tool in env.policy_tools()]
    messages: list[dict[str, Any]] = [{"role": "user", "content": env.question}]
    for _ in range(16):
        message = next_turn(env.question, tools, messages, random.Random(0), planter(rate))
        assert message is not None
        messages.append(message)
        if not message.get("tool_calls"):
            return messages, calls
        for call in message["tool_calls"]:
            calls += 1
            value = bench.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    raise AssertionError("the policy does not end")


def test_the_policy_solves_environments_from_question_and_tools_alone():
    for env in ENVIRONMENTS:
        messages, calls = play(env)
        if env.expect == "answer":
            assert env.answer in messages[-1]["content"]
            assert len(env.goldens) <= calls <= len(env.goldens) + 1
        else:
            assert calls == 0
            asks = messages[-1]["content"].endswith(("?", "？", ".", "。"))
            assert asks
            assert ("name" in messages[-1]["content"] or "哪" in messages[-1]["content"]) == (env.expect == "ask")


def test_the_policy_tries_a_passing_fault_again_and_gives_up_on_a_lasting_one():
    env = next(e for e in ENVIRONMENTS if e.scenario == "single_hop")
    tools = [tool.model_dump(mode="json") for tool in env.policy_tools()]
    messages: list[dict[str, Any]] = [{"role": "user", "content": env.question}]
    tried = []
    for _ in range(5):
        message = next_turn(env.question, tools, messages, random.Random(0), planter())
        assert message is not None
        messages.append(message)
        if not message.get("tool_calls"):
            break
        call = message["tool_calls"][0]
        tried.append(call["function"]["arguments"])
        fault = json.dumps({"error": "timeout", "message": "no reply"})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": fault})
    assert len(tried) == 3
    assert len(set(tried)) == 1
    assert messages[-1]["content"]


def test_the_policy_leaves_questions_of_other_tools_alone():
    tools = [
        {
            "type": "function",
            "function": {
                "name": "roll",
                "description": "Roll some dice",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
    assert next_turn("Find the weather of Paris.", tools, [], random.Random(0), planter()) is None


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_stateful_task_ends_in_its_goal(language):
    kinds = Counter()
    for seed in range(30):
        world = read_world(random_knowledge(random.Random(seed), language))
        task = stateful_task(world, random.Random(seed))
        if task is None:
            continue
        kinds[len(task.steps)] += 1
        assert task.answer not in task.question
        table = next(iter(task.state))
        if "state" in task.goal:
            before, after = task.state[table], task.goal["state"][table]
            assert sum(before.values()) == sum(after.values())
            assert before != after
        for question, _, parents in task.steps:
            read = read_question(question, language)
            assert read is not None
            assert read.needs == len(parents)
    assert kinds[1] > 0
    assert kinds[2] > 0


DRAFT = {
    "question": "What is the wing span of the home plane of Mira Sol plus the wing span of KL-300?",
    "answer": "51",
    "answer_type": "number",
    "nodes": [
        {"id": "n1", "question": "What is the home plane of Mira Sol?", "answer": "KL-207", "parents": [], "needs_tool": True},
        {"id": "n2", "question": "What is the wing span of that plane?", "answer": 34, "parents": ["n1"], "needs_tool": True},
        {"id": "n3", "question": "What is the wing span of KL-300?", "answer": 17, "parents": [], "needs_tool": True},
        {"id": "n4", "question": "What is the first number plus the second number?", "answer": 51, "parents": ["n2", "n3"], "needs_tool": True},
    ],
    "state": None,
    "goal": None,
}  # fmt: skip
TEXT = (
    "Mira Sol and Jon Aas are pilots. KL-207 and KL-300 are planes. The home plane of Mira Sol is KL-207. "
    "The home plane of Jon Aas is KL-300. The wing span of KL-207 is 34 metres. The wing span of KL-300 is 17 metres."
)


def verdicts(draft: dict[str, Any]) -> set[str]:
    """Names of the teacher's judges that refuse a draft."""
    load()
    request = {"language": "en", "text": TEXT, "question": draft["question"], "nodes": draft["nodes"]}
    out = set()
    for name in ("necessity", "dependency", "atomicity", "serialisation", "completeness"):
        reply = PROGRAMS[f"verifier.{name}"](request, random.Random(0), planter())
        needs = {node["id"]: node["needs_tool"] for node in draft["nodes"]}
        if name == "completeness":
            refused = not reply["complete"]
        else:
            refused = any(
                item.get("tool_necessary", needs[item["id"]]) != needs[item["id"]]
                or item.get("verdict", "sufficient") != "sufficient"
                or not item.get("is_atomic", True)
                or item.get("forced", False)
                for item in reply["items"]
            )
        if refused:
            out.add(name)
    return out


def test_the_judges_pass_a_sound_decomposition():
    assert verdicts(DRAFT) == set()


@pytest.mark.parametrize(
    ("kind", "judges"),
    [
        ("compound_sub_question", {"atomicity"}),
        ("needless_dependency", {"dependency", "serialisation"}),
        ("useless_parent", {"dependency"}),
        ("missing_dependency", {"dependency"}),
        ("incomplete_decomposition", {"completeness"}),
        ("wrong_tool_need", {"necessity"}),
    ],
)
def test_each_planted_defect_is_refused_by_the_judges_that_it_is_for_and_by_no_other(kind, judges, monkeypatch):
    monkeypatch.setattr("agents.teacher.planter.Planter.pick", lambda self, kinds, scope=None: kind)
    broken = break_decomposition(DRAFT, {"language": "en", "domain": "d", "variation": 0}, random.Random(0), planter())
    assert isinstance(broken, dict)
    assert verdicts(broken) == judges


def test_arithmetic_with_an_operand_that_is_not_known_is_not_called_easy():
    """`that number times 6` without its parent is a missing dependency, no sum to do in one's head."""
    nodes = [{"id": "n1", "question": "What is that number times 6?", "answer": 204, "parents": [], "needs_tool": True}]
    load()
    request = {"language": "en", "text": TEXT, "question": DRAFT["question"], "nodes": nodes}
    (item,) = PROGRAMS["verifier.necessity"](request, random.Random(0), planter())["items"]
    assert item["tool_necessary"]


def test_a_defect_is_labelled_only_where_it_was_written():
    sink = LabelSink()
    request = {"language": "en", "domain": "d", "variation": 0}
    kinds = set()
    for index in range(200):
        plant = Planter(seed=0, rate=0.5, key=str(index), agent="decomposer.decompose", sink=sink)
        before = len(sink.labels)
        broken = break_decomposition(DRAFT, request, random.Random(index), plant)
        assert (broken is not None) == (len(sink.labels) == before + 1) or len(sink.labels) == before
        if broken is not None:
            assert broken != DRAFT
            kinds.add(json.dumps(broken, sort_keys=True) if isinstance(broken, dict) else "malformed")
    assert {label["kind"] for label in sink.labels} == set(DECOMPOSITION_DEFECTS)
    assert len(kinds) >= len(DECOMPOSITION_DEFECTS)


def test_every_code_defect_can_be_written_and_changes_the_code():
    env = next(
        e for e in ENVIRONMENTS for g in e.goldens
        if len(g.arguments) > 1 and 'data["' in next(t.code for t in e.tools if t.name == g.tool) and isinstance(g.returns, (int, float))
    )  # fmt: skip
    golden = next(g for g in env.goldens if len(g.arguments) > 1 and isinstance(g.returns, (int, float)))
    tool = next(t for t in env.tools if t.name == golden.tool)
    request = {"node": {"answer": golden.returns}, "arguments": golden.arguments, "tool": tool.model_dump()}
    sink = LabelSink()
    for index in range(120):
        plant = Planter(seed=0, rate=1.0, key=str(index), agent="decomposer.tool_code", sink=sink)
        assert break_code(tool.code, request, random.Random(index), plant) != tool.code
    assert {label["kind"] for label in sink.labels} == set(CODE_DEFECTS)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1) as box:
        yield box


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (None, None),
        ("constant_tool", "constant_tool"),
        ("ignored_argument", "mutant_survived"),
        ("nondeterministic_code", "nondeterministic"),
        ("unsafe_code", "unsafe_code"),
        ("hard_coded_answer", "hard_coded"),
        ("wrong_value", "golden_mismatch"),
        ("timeout_loop", "timeout"),
    ],
)
def test_the_gates_find_each_code_defect_and_pass_the_code_without_it(kind, reason, sandbox, monkeypatch):
    env, golden, tool = next(
        (e, g, t)
        for e in ENVIRONMENTS for g in e.goldens for t in e.tools
        if t.name == g.tool and len(g.arguments) > 1 and 'data["' in t.code and isinstance(g.returns, (int, float))
    )  # fmt: skip
    request = {"node": {"answer": golden.returns}, "arguments": golden.arguments, "tool": tool.model_dump()}
    monkeypatch.setattr("agents.teacher.planter.Planter.pick", lambda self, kinds, scope=None: kind)
    code = break_code(tool.code, request, random.Random(0), planter())
    findings = gate_tool(tool.model_copy(update={"code": code}), [golden], env.data, sandbox, language=env.language)
    reasons = {finding.reason for finding in findings}
    assert reasons == set() if reason is None else reason in reasons
