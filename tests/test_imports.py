"""Imports point one way, and graphs and agents do without JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each part may import of ours, besides itself. `astrolabe.progress` imports nothing of ours and serves all.
ORDER = ["records", "envs", "model", "serving", "agents", "graphs", "jax_train", "evals", "report", "cli"]
ALLOWED: dict[str, set[str]] = {part: set(ORDER[:n]) for n, part in enumerate(ORDER)}
ALLOWED["records"] = set()
ALLOWED["model"] = {"records"}
ALLOWED["cli"] = set(ORDER)
ALLOWED["evals"] = {"records", "envs", "model", "serving", "agents", "graphs", "jax_train"}
# The worlds that ship as data are knowledge and code about it; nothing below graphs needs them.
ALLOWED["worlds"] = {"records", "envs"}
TOP = {"serving", "agents", "graphs", "jax_train"}
# Files of a part that may import less than the part may.
STRICT = {
    "serving/chat.py": {"records", "serving"},
    "serving/tokens.py": {"records", "serving"},
    "serving/render.py": {"records", "serving"},
    "serving/http.py": {"records"},
    "serving/health.py": {"records"},
}
EMBEDDING = "astrolabe.model.embedding"


def part_of(module: str) -> str | None:
    """The part that a module of ours lies in; None for a module of others."""
    words = module.split(".")
    if words[0] in TOP:
        return words[0]
    if words[0] == "astrolabe":
        return words[1] if len(words) > 1 else ""
    return None


def imports_of(file: Path, package: str) -> set[str]:
    """Every module that a file imports, at its top or inside functions; not those for type checkers only."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        todo += ast.iter_child_nodes(node)
    return found


def files() -> list[Path]:
    roots = [ROOT / "astrolabe", *(ROOT / name for name in sorted(TOP))]
    return sorted(path for root in roots for path in root.rglob("*.py"))


def faults(file: Path) -> list[str]:
    name = file.relative_to(ROOT).as_posix()
    package = ".".join(file.relative_to(ROOT).parent.parts)
    own = part_of(package + "." + file.stem) or ""
    out = []
    for module in sorted(imports_of(file, package)):
        part = part_of(module)
        if not part or part.startswith("__") or part in (own, "progress"):
            continue
        if own == "progress":
            out.append(f"{name} imports {module}; it may import nothing of ours")
        elif own == "envs" and part == "model":
            if not module.startswith(EMBEDDING) and module != "astrolabe.model":
                out.append(f"{name} imports {module}; envs use the model for the embedding only")
        elif part not in STRICT.get(name, ALLOWED.get(own, set())):
            out.append(f"{name} imports {module}")
    return out


def test_imports_point_one_way():
    assert [fault for file in files() for fault in faults(file)] == []


def test_the_direction_test_sees_a_wrong_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "astrolabe/records").mkdir(parents=True)
    (tmp_path / "graphs").mkdir()
    wrong = tmp_path / "astrolabe/records/x.py"
    wrong.write_text("def f():\n    from graphs.batch import run_batch\n")
    right = tmp_path / "graphs/y.py"
    right.write_text("from astrolabe.records import ids\nfrom . import z\n")
    assert faults(wrong) == [
        "astrolabe/records/x.py imports graphs.batch",
        "astrolabe/records/x.py imports graphs.batch.run_batch",
    ]
    assert faults(right) == []


WITHOUT_JAX = """
import sys, importlib, pkgutil
class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax"):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
sys.meta_path.insert(0, NoJax())
names = ["serving.chat", "serving.tokens", "serving.render", "serving.http", "astrolabe.cli.main"]
import agents, graphs, astrolabe.records
for package in (agents, graphs, astrolabe.records):
    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
assert not any(name.split(".")[0] in ("jax", "jaxlib", "flax") for name in sys.modules)
print(len(names))
"""


@pytest.mark.timeout(120)
def test_graphs_and_agents_import_with_jax_absent():
    done = subprocess.run([sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 20


def test_help_of_the_command_imports_no_heavy_package():
    code = (
        "import sys\nfrom astrolabe.cli.main import main\ncode = main(['synth', 'trajectories', '--help'])\n"
        "heavy = {'jax', 'langgraph', 'openai', 'tensorstore', 'numpy', 'renderers'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--replay" in done.stdout
