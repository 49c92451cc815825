"""Recall and precision of every gate and judge of environment synthesis against the offline teacher's labels.

    python benchmarks/defects_environments.py --limit 204 --defect-rate 0.4 --seed 3

The teacher plants defects and labels them in a side file that no gate or judge reads; here the labels are joined with
what became of each decomposition and each tool. A defect that an earlier stage stopped never reached the later
detector and does not count for it. Exit code 1 if a detector with a planted defect is below 0.95 in either figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.teacher.defects import label_of_code, label_of_decomposition, label_of_doc
from graphs.environment import synthesise_environments
from graphs.options import SynthOptions

BAR = 0.95
DETECTORS: dict[str, tuple[str, ...]] = {
    "cyclic_graph": ("cyclic_dependency",),
    "missing_parent": ("unknown_parent",),
    "atomicity_fail": ("compound_sub_question",),
    "serialisation_fail": ("needless_dependency",),
    "dependency_fail": ("needless_dependency", "useless_parent", "missing_dependency"),
    "completeness_fail": ("incomplete_decomposition",),
    "necessity_fail": ("wrong_tool_need",),
    "answer_leak": ("leaking_description",),
    "constant_tool": ("constant_tool",),
    "mutant_survived": ("ignored_argument",),
    "nondeterministic": ("nondeterministic_code",),
    "unsafe_code": ("unsafe_code",),
    "hard_coded": ("hard_coded_answer",),
    "golden_mismatch": ("wrong_value", "wrong_golden"),
    "timeout": ("timeout_loop",),
}
"""Reason code -> the defects that it is for."""
ALSO: dict[str, tuple[str, ...]] = {
    "hard_coded": ("constant_tool",),
    "golden_mismatch": ("nondeterministic_code",),
    "degenerate_tool": ("constant_tool",),
    "mutant_survived": ("hard_coded_answer",),
}
"""Reason code -> defects that it rightly finds too, though another is for them: of a tool that answers the golden from
its code, the other arguments are dead there."""
STAGE_OF = {
    "cyclic_graph": "structure",
    "missing_parent": "structure",
    "atomicity_fail": "verify",
    "serialisation_fail": "verify",
    "dependency_fail": "verify",
    "completeness_fail": "verify",
    "necessity_fail": "verify",
}
"""Detectors of decompositions; all others look at tools."""
ORDER = ("decompose", "structure", "verify", "tools", "assemble", "certify")


@dataclass
class Score:
    """Counts of one detector."""

    found: int = 0
    missed: int = 0
    false: int = 0
    examples: list[str] = field(default_factory=list)
    """Of what was missed or falsely found."""

    @property
    def recall(self) -> float | None:
        return self.found / (self.found + self.missed) if self.found + self.missed else None

    @property
    def precision(self) -> float | None:
        return self.found / (self.found + self.false) if self.found + self.false else None

    @property
    def good(self) -> bool:
        return all(figure is None or figure >= BAR for figure in (self.recall, self.precision))


def _rows(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file if line.strip()]


def score(run: Path, labels: Path) -> dict[str, Score]:
    """Detector -> its counts, from a run folder and the teacher's label file."""
    planted: dict[str, str] = {row["item"]: row["kind"] for row in _rows(labels)}
    scores: dict[str, Score] = defaultdict(Score)
    ended: dict[str, tuple[str, list[str]]] = {}
    broken_golden: set[str] = set()
    rejected = _rows(run / "rejected.jsonl")
    for row in rejected:
        if row["stage"] in ("tool_gates", "collect") or "question" not in row["row"] or row["stage"] == "certify":
            continue
        item = label_of_decomposition(row["row"]["domain"], row["row"]["question"] or "", row["row"]["variation"])
        ended[item] = (row["stage"], row["reasons"])
        if planted.get(item) == "wrong_golden":
            broken_golden.add(row["item"])
    _score_decompositions(planted, ended, scores)
    _score_tools(planted, rejected, broken_golden, scores)
    return dict(scores)


def _judge(scores: dict[str, Score], detector: str, kind: str | None, fired: bool, where: str) -> None:
    """Counts one thing that a detector looked at."""
    wanted = kind in DETECTORS[detector]
    if fired and not wanted and kind not in ALSO.get(detector, ()):
        scores[detector].false += 1
        scores[detector].examples.append(f"false: {where} ({kind})")
    elif fired and wanted:
        scores[detector].found += 1
    elif wanted:
        scores[detector].missed += 1
        scores[detector].examples.append(f"missed: {where} ({kind})")


def _score_decompositions(
    planted: dict[str, str], ended: dict[str, tuple[str, list[str]]], scores: dict[str, Score]
) -> None:
    for item in sorted({*ended, *(i for i in planted if i.startswith("dc-"))}):
        stage, reasons = ended.get(item, ("certify", []))
        for detector, at in STAGE_OF.items():
            if ORDER.index(at) <= ORDER.index(stage):  # it got that far
                _judge(scores, detector, planted.get(item), detector in reasons and at == stage, item)
        if planted.get(item) == "wrong_golden" and ORDER.index(stage) >= ORDER.index("tools"):
            _judge(scores, "golden_mismatch", "wrong_golden", "golden_mismatch" in reasons, item)


def _score_tools(
    planted: dict[str, str], rejected: list[dict[str, Any]], broken_golden: set[str], scores: dict[str, Score]
) -> None:
    seen: set[str] = set()
    for row in rejected:
        if row["stage"] != "tool_gates":
            continue
        tool = row["row"]["tool"]
        mine = [label_of_doc(tool), label_of_code(tool["code"], row["row"]["arguments"])]
        kinds = [planted[item] for item in mine if item in planted]
        seen.update(mine)
        if row["item"] in broken_golden:
            kinds.append("wrong_golden")
        reasons = set(row["reasons"])
        for kind in kinds:
            for detector, wanted in DETECTORS.items():
                masked = "unsafe_code" in reasons and detector != "unsafe_code" and kind != "unsafe_code"
                if kind in wanted and kind != "wrong_golden" and not masked:
                    _judge(scores, detector, kind, detector in reasons, row["detail"][:100])
        explained = {d for k in kinds for d in DETECTORS if k in DETECTORS[d] or k in ALSO.get(d, ())}
        for detector in sorted(reasons & set(DETECTORS) - explained):
            _judge(scores, detector, None, True, row["detail"][:100])
    for item, kind in planted.items():  # labelled, and let through
        if item[:3] in ("td-", "co-") and item not in seen:
            for detector, wanted in DETECTORS.items():
                if kind in wanted:
                    _judge(scores, detector, kind, False, item)


def table(scores: dict[str, Score]) -> str:
    """The figures as lines of text."""

    def show(figure: float | None) -> str:
        return "-" if figure is None else f"{figure:.3f}"

    lines = [f"{'detector':<20} {'found':>6} {'missed':>6} {'false':>6} {'recall':>7} {'precision':>9}"]
    for name in DETECTORS:
        s = scores.get(name, Score())
        lines.append(
            f"{name:<20} {s.found:>6} {s.missed:>6} {s.false:>6} {show(s.recall):>7} {show(s.precision):>9}"
            + ("" if s.good else "   below " + str(BAR))
        )
        lines += [f"    {text}" for text in s.examples[:5]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=204)
    parser.add_argument("--defect-rate", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="keep the run here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or Path(folder) / "run"
        labels = out.parent / f"{out.name}-labels.jsonl"
        options = SynthOptions(
            limit=arguments.limit, defect_rate=arguments.defect_rate, seed=arguments.seed, labels=labels
        )
        synthesise_environments(None, out, options)
        scores = score(out, labels)
    print(table(scores))
    return 0 if all(s.good for s in scores.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
