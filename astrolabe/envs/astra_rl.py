"""ASTRA's released RL rows, read as environments, so that the gates can be run on them.

A row has `prompt` (messages), `tool_schema` (OpenAI schemas), `tool_dict` (name -> code) and `sub_qa_dict` (name ->
target answers); the last three are JSON texts. It records neither the arguments of a right call nor what depends on
what: each target becomes a node of its own whose golden has no arguments, which the gates then say, beside what they find
in the tools. Nothing is made up to fill the gaps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from astrolabe.records.environment import environment_id
from astrolabe.records.equality import has_chinese
from astrolabe.records.errors import UsageError
from astrolabe.records.jsonl import read_rows

LICENSE = "Apache-2.0"
"""The licence that the data set's card states."""


def convert_file(path: Path, out: Path) -> Path:
    """Write the rows of `path` as environments to `out`, line by line. UsageError names a row that is not of the form."""
    with open(out, "w", encoding="utf-8", newline="\n") as file:
        for number, row in read_rows(path):
            try:
                environment = convert(row)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise UsageError(
                    f"{path}, line {number}: no ASTRA-RL row: {type(error).__name__} {error}",
                    "rows have prompt, tool_schema, tool_dict and sub_qa_dict",
                ) from None
            file.write(json.dumps(environment, ensure_ascii=False) + "\n")
    return out


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """One row as a raw environment with its id. Raises what the missing or odd field raises."""
    schemas, codes, targets = (_parsed(row[name]) for name in ("tool_schema", "tool_dict", "sub_qa_dict"))
    question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    tools, distractors = [], []
    for schema in schemas:
        function = schema.get("function", schema)
        tool = {
            "name": function["name"],
            "description": function.get("description", ""),
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
            "code": codes.get(function["name"], ""),
        }
        if function["name"] in targets:
            tools.append(tool)
        else:
            distractors.append({**tool, "band": "medium", "similarity": 0.0})
    wanted = [(name, answer) for name, answers in targets.items() for answer in answers]
    nodes = [
        {"id": f"n{i}", "question": "", "answer": answer, "parents": [], "tool": name}
        for i, (name, answer) in enumerate(wanted, 1)
    ]
    environment = {
        "schema": "astrolabe.environment/1",
        "id": "",
        "language": "zh" if has_chinese(question) else "en",
        "domain": "",
        "question": question,
        "answer": str(wanted[-1][1]) if wanted else "",
        "scenario": "no_tool" if not wanted else "single_hop" if len(wanted) == 1 else "parallel_single_hop",
        "expect": "answer" if wanted else "abstain",
        "answer_type": "span" if wanted else "none",
        "nodes": nodes,
        "tools": tools,
        "goldens": [
            {"node": node["id"], "tool": node["tool"], "arguments": {}, "returns": node["answer"]} for node in nodes
        ],
        "distractors": distractors,
        "data": None,
        "mode": "stateless",
        "state": None,
        "goal": None,
        "certificate": None,
        "provenance": {"source": "ASTRA-RL", "license": LICENSE},
    }
    return {**environment, "id": environment_id(environment)}


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
