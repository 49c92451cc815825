"""hard_coded: with `data`, changing the value that a golden reads changes the golden's value.

Data is varied part by part: first the leaves that equal the golden's value, then field by field, then leaf by leaf, then
by dropping members. One variation that gives another valid value is enough; an error is not, since a tool can look
whether a key is there and then return what it knows by heart. The variants of a golden run in one child.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator
from typing import Any

from astrolabe.envs.arguments import whole_numbers
from astrolabe.envs.gates.evidence import PROBE_CPU_S, Evidence
from astrolabe.envs.gates.literals import code_literals, scalars
from astrolabe.envs.gates.replay import call_text
from astrolabe.envs.gates.report import Finding
from astrolabe.records.environment import EnvTool, Golden
from astrolabe.records.equality import equal, informative, leaves

Path = tuple[str | int, ...]
_MAX_VARIANTS = 160
_CALLER = "astrolabe_call_with_data"


def _takes(tool: EnvTool, name: str) -> bool:
    """Whether the tool's function has this keyword-only parameter."""
    for node in ast.parse(tool.code).body:
        if isinstance(node, ast.FunctionDef) and node.name == tool.name:
            return any(argument.arg == name for argument in node.args.kwonlyargs)
    return False


def check_hard_coded(evidence: Evidence) -> list[Finding]:
    data = evidence.env.data
    if data is None:
        return []
    findings = []
    for place, golden in enumerate(evidence.oracle):
        execution = evidence.replays.get(golden.node)
        if execution is None or execution.status != "ok":
            continue
        tool = evidence.tools[golden.tool]
        if _takes(tool, "data"):
            fixed = not _follows_data(evidence, golden, place)
            why = "no change of data changes its value"
        else:
            fixed = _knows_by_heart(tool, golden, data)
            why = "it returns a value of data that stands in its code"
        if fixed:
            findings.append(Finding("hard_coded", f"{call_text(golden)}: {why}", golden.node, golden.tool))
    return findings


def _knows_by_heart(tool: EnvTool, golden: Golden, data: Any) -> bool:
    """For a tool that takes no data: whether an informative part of the golden's value stands both in data and in code."""
    code = [scalar for literal in code_literals(tool.code) for scalar in scalars(literal)]
    stored = list(leaves(data))
    own = list(leaves(golden.arguments))
    return any(
        informative(part)
        and any(equal(part, leaf) for leaf in stored)
        and any(equal(part, scalar) for scalar in code)
        and not any(equal(part, argument) for argument in own)
        for part in leaves(golden.returns)
    )


def _follows_data(evidence: Evidence, golden: Golden, place: int) -> bool:
    tool = evidence.tools[golden.tool]
    state = evidence.states[place]
    stateful = _takes(tool, "state")
    # The child varies the state of each call, not its data; so data is handed over as (part of) a state.
    passed = "data=state['data'], state=state['state']" if stateful else "data=state['data']"
    code = f"{tool.code}\n\ndef {_CALLER}(arguments, *, state):\n    return {tool.name}(**arguments, {passed})\n"
    variants = itertools.islice(variations(evidence.env.data, golden), _MAX_VARIANTS)
    arguments = {"arguments": whole_numbers(tool.parameters, golden.arguments)}
    before = evidence.replays[golden.node].value
    size = 4  # nearly always one of the first variants does it
    while part := list(itertools.islice(variants, size)):
        states = [{"data": variant, "state": state} for variant in part]
        executions = evidence.sandbox.run_many(
            code, _CALLER, [arguments] * len(part), states=states, cpu_s=PROBE_CPU_S, wall_s=10 * PROBE_CPU_S
        )
        if any(execution.status == "ok" and not equal(execution.value, before) for execution in executions):
            return True
        size = 40
    return False


def variations(data: Any, golden: Golden) -> Iterator[Any]:
    """Changed copies of `data`, the likeliest to change the golden's value first."""
    paths = list(_leaf_paths(data))
    values = [_at(data, path) for path in paths]
    wanted = [leaf for leaf in leaves(golden.returns) if leaf is not None]
    own = list(leaves(golden.arguments))
    result = [p for p, v in zip(paths, values, strict=True) if any(equal(v, leaf) for leaf in wanted)]
    free = [p for p, v in zip(paths, values, strict=True) if not any(equal(v, argument) for argument in own)]
    if result:
        yield _changed(data, result)
    fields: dict[Path, list[Path]] = {}
    for path in free:
        fields.setdefault(tuple("*" if isinstance(step, int) else step for step in path), []).append(path)
    by_name: dict[str | int, list[Path]] = {}
    for path in free:
        by_name.setdefault(next((step for step in reversed(path) if isinstance(step, str)), ""), []).append(path)
    numbers = [p for p in free if isinstance(_at(data, p), (int, float)) and not isinstance(_at(data, p), bool)]
    for group in (*by_name.values(), *fields.values(), numbers):
        if group:
            yield _changed(data, group)
    for group in (numbers, *by_name.values()):  # what is larger becomes smaller, what is enough becomes too little
        if group:
            yield _changed(data, group, negate=True)
    for path in [*result, *free][:96]:
        yield _changed(data, [path])
    for path in paths[:32]:
        yield _changed(data, [path])
    yield from _with_members_dropped(data)


def _leaf_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _leaf_paths(member, (*path, key))
    elif isinstance(value, list):
        for i, member in enumerate(value):
            yield from _leaf_paths(member, (*path, i))
    else:
        yield path


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _changed(data: Any, paths: list[Path], *, negate: bool = False) -> Any:
    """A copy with the leaves at `paths` replaced by other values of their type. Numbers grow by different amounts, so that
    their differences change too, or change their sign."""
    out = copy.deepcopy(data)
    for i, path in enumerate(paths):
        if not path:
            continue
        holder, key = _at(out, path[:-1]), path[-1]
        value = holder[key]
        if isinstance(value, bool):
            holder[key] = not value
        elif isinstance(value, (int, float)):
            holder[key] = -value - 1 if negate else value + 1 + (i * 7) % 5
        elif isinstance(value, str):
            holder[key] = _other_text(value)
        else:
            holder[key] = 1
    return out


def _other_text(text: str) -> str:
    """Another text of the same look: its last digit changed (a date or code stays one), else a letter added."""
    for i in range(len(text) - 1, -1, -1):
        if text[i].isdecimal() and text[i].isascii():
            return text[:i] + str((int(text[i]) + 1) % 9 + 1 if text[i] != "0" else 1) + text[i + 1 :]
    return text + "x"


def _with_members_dropped(value: Any) -> Iterator[Any]:
    """Copies without the last or the first member of a list, or without one key of an object, outermost first."""
    for path in itertools.islice(_holder_paths(value), 16):
        holder = _at(value, path)
        keys = [len(holder) - 1, 0] if isinstance(holder, list) else list(holder)[:8]
        for key in keys:
            out = copy.deepcopy(value)
            del _at(out, path)[key]
            yield out


def _holder_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(value, (dict, list)) and value:
        yield path
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in members:
            yield from _holder_paths(member, (*path, key))
