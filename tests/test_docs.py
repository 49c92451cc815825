"""The documents stay true: their quick commands run, their links lead somewhere, their files exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
QUICK = re.compile(r"<!-- quick -->\n```(?:bash|sh)\n(.*?)```", re.S)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def quick_commands() -> list[tuple[str, list[str]]]:
    """(document, commands) of each block that is marked with `<!-- quick -->`; lines run in order."""
    found = []
    for document in DOCUMENTS:
        for block in QUICK.findall(document.read_text(encoding="utf-8")):
            joined = block.replace("\\\n", " ")
            found.append((document.name, [line for line in joined.splitlines() if line and not line.startswith("#")]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("document", "commands"), quick_commands(), ids=lambda v: v if isinstance(v, str) else "")
def test_quick_commands_of_the_documents_run(document: str, commands: list[str], tmp_path: Path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in commands:
        words = shlex.split(command.replace("runs/", f"{tmp_path}/"), comments=True)
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{document}: {command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


def test_there_are_quick_commands_in_the_readme():
    assert any(name == "README.md" for name, _ in quick_commands())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_of_the_documents_lead_to_files(document: Path):
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_folder_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:astrolabe|serving|agents|graphs|jax_train|configs|benchmarks|tests)/[\w./]*)`", text))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
