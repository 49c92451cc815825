"""Seeded defects, and the side file that says where they are.

A real model errs; so does the teacher, at a seeded rate, and it knows where. Each defect that it really wrote is one line
`{"key","agent","kind","item","detail"}` of a JSONL file that no gate and no judge reads: `key` is the hash of the request,
`item` joins the label with its outcome (the hash of the question for a conversation, a server's or node's name otherwise).
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astrolabe.records.errors import RunError, UsageError
from astrolabe.records.ids import content_hash, rng_for
from astrolabe.records.jsonl import read_rows


def question_item(question: str) -> str:
    """The item of a conversation's labels: `q-` + hash of its question, computable from any trajectory's task."""
    return "q-" + content_hash(question)


class LabelSink:
    """Appends labels to a file, each once, also over restarts. Without a path labels are kept in memory only.

    UsageError if the file cannot be opened. Once a label could not be written, every further one is a RunError: an
    answer whose label is lost must not be given.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.labels = path, []  # type: tuple[Path | None, list[dict[str, Any]]]
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._failure: str | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "ab"):
                    pass
                if path.is_file():  # a device has nothing to read back, or has no end
                    _drop_torn_line(path)
                    self._seen = {content_hash(row) for _, row in read_rows(path)}
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror}", "give a file that can be written to --labels") from None

    def write(self, label: dict[str, Any]) -> None:
        identity = content_hash(label)
        with self._lock:
            if identity in self._seen:
                return
            if self.path is not None:
                self._append(self.path, json.dumps(label, ensure_ascii=False) + "\n")
            self._seen.add(identity)
            self.labels.append(label)

    def _append(self, path: Path, line: str) -> None:
        if self._failure is None:
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(line)
            except OSError as error:
                self._failure = error.strerror
        if self._failure is not None:
            raise RunError(f"{path}: a label cannot be written: {self._failure}", "make room there")


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed process left after the last newline; the label comes again."""
    with open(path, "r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


class Planter:
    """Decides, for one request, whether a defect is planted, and labels those that are."""

    def __init__(self, *, seed: int, rate: float, key: str, agent: str, sink: LabelSink) -> None:
        self.seed, self.rate, self.key, self.agent = seed, rate, key, agent
        self._sink = sink

    def maybe(
        self,
        kind: str,
        rng: random.Random | None = None,
        *,
        item: str = "",
        share: float = 1.0,
        scope: Any = None,
        detail: Any = None,
    ) -> bool:
        """Whether to plant `kind` here (probability: rate x share); True has written the label. The draw is seeded by
        `scope` (default: the request), or taken from `rng`."""
        draw = (rng or rng_for(self.seed, "plant", self.agent, kind, self._scope(scope))).random()
        if draw >= self.rate * share:
            return False
        self.label(kind, item=item, detail=detail)
        return True

    def pick(self, kinds: Sequence[str], *, scope: Any = None) -> str | None:
        """One kind with the overall rate, else None; equal scopes give equal picks. Writes no label: call `label` where
        the defect is really written."""
        rng = rng_for(self.seed, "pick", self.agent, self._scope(scope))
        return rng.choice(list(kinds)) if kinds and rng.random() < self.rate else None

    def label(self, kind: str, *, item: str = "", detail: Any = None) -> None:
        """Write the label of a planted defect."""
        self._sink.write({"key": self.key, "agent": self.agent, "kind": kind, "item": item, "detail": detail})

    def _scope(self, scope: Any) -> str:
        return self.key if scope is None else content_hash(scope)
