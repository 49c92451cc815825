"""Every graph of `langgraph.json` loads, has forms, and imports neither JAX nor anything that opens a connection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LISTED: dict[str, dict[str, str]] = json.loads((ROOT / "langgraph.json").read_text(encoding="utf-8"))["graphs"]

LOADER = """
import importlib.util, json, sys
class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('jax', 'flax', 'optax'):
            raise ImportError(name + ' is not needed here')
sys.meta_path.insert(0, NoJax())
modules, out = {}, {}
for name, entry in json.load(open('langgraph.json'))['graphs'].items():
    path, variable = entry['path'].rsplit(':', 1)
    if path not in modules:
        spec = importlib.util.spec_from_file_location('listed_' + str(len(modules)), path)
        modules[path] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[path]
        spec.loader.exec_module(modules[path])
    graph = modules[path].__dict__[variable]
    out[name] = {
        'type': type(graph).__name__, 'name': graph.name, 'checkpointer': graph.checkpointer is not None,
        'input': graph.get_input_jsonschema(), 'context': graph.get_context_jsonschema(),
        'edges': [(e.source, e.target) for e in graph.get_graph(xray=True).edges],
    }
import threading
out['#threads'] = [t.name for t in threading.enumerate() if t.name == 'teacher']
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error::langgraph.warnings.LangGraphDeprecationWarning", "-c", LOADER],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_listed_graph_is_compiled_and_can_be_shown_as_a_form(loaded: dict[str, Any], name: str):
    graph = loaded[name]
    assert graph["type"] == "CompiledStateGraph"
    assert not graph["checkpointer"], "the server brings its own"
    assert graph["input"]["properties"], "the input form"
    fields = graph["context"]["properties"]
    assert {"base_url", "model", "seed"} <= set(fields)
    assert not graph["context"].get("required"), "every field of the context has a default"
    assert graph["edges"], "the picture"
    assert LISTED[name]["description"]


def test_loading_opens_nothing(loaded: dict[str, Any]):
    assert loaded["#threads"] == []


def test_every_role_and_graph_of_the_house_is_listed():
    roles = {"trajectory", "environment", "solver", "planner", "emulator", "decomposer", "verifier", "judge", "policy"}
    assert roles <= {name.split("_")[0] for name in LISTED}


async def test_a_role_runs_alone_from_a_form_with_the_teacher_started_on_first_use():
    from graphs import studio

    request = {
        "question": "Please ring the bell of the harbour.",
        "tools": [{"name": "ring_bell", "description": "Ring the bell of the harbour"}],
    }
    out = await studio.planner_check.ainvoke({"request": request}, context={"seed": 3})
    assert out["reply"] == {"kind": "answer", "chain": ["ring_bell"]}
    card = {"name": "harbour", "license": "MIT", "tools": [request["tools"][0] | {"parameters": {"type": "object"}}]}
    out = await studio.solver.ainvoke({"question": request["question"], "card": card}, context={})
    assert out["status"] == "finished"
    assert [c["tool"] for c in out["calls"]] == ["ring_bell"]
