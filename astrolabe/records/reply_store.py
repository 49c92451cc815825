"""Model replies by the hash of their request: a request is sent once per run, and a run can be replayed without a model.

One file per reply, `replies/ab/abcd....json`, written whole or not at all. A kill loses at most the replies under way.
With `replay_from` the replies of another run are looked up too, and copied, so that the new run is whole in itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from astrolabe.records.durable import write_atomic
from astrolabe.records.errors import RunError

_KEY = re.compile(r"[0-9a-f]{8,64}")


class ReplyStore:
    """`path`: the folder of replies. `replay_from`: another run's folder (or its `replies`)."""

    def __init__(self, path: Path, replay_from: Path | None = None, replay_only: bool = False) -> None:
        self.path = path
        self.replay_only = replay_only
        self._other: Path | None = None
        if replay_from is not None:
            self._other = replay_from / "replies" if (replay_from / "replies").is_dir() else replay_from
            if not self._other.is_dir():
                raise RunError(f"{replay_from}: holds no replies", "give the folder of a finished run to --replay")
        path.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"a reply's key is the hex hash of its request, not {key!r}")
        return folder / key[:2] / f"{key}.json"

    @staticmethod
    def _read(file: Path) -> dict[str, Any] | None:
        try:
            reply = json.loads(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:  # torn by a power cut: the request is sent again and the file written anew
            return None
        return reply if isinstance(reply, dict) else None

    def get(self, key: str) -> dict[str, Any] | None:
        """The reply to the request of that hash, or None. RunError if only replayed replies may be used."""
        reply = self._read(self._file(self.path, key))
        if reply is None and self._other is not None:
            reply = self._read(self._file(self._other, key))
            if reply is not None:
                self.put(key, reply)
        if reply is None and self.replay_only:
            raise RunError(
                f"{self._other or self.path}: no stored reply to request {key}",
                "replay with the inputs, seed and options of the recorded run, or leave --replay out to ask the model",
            )
        return reply

    def put(self, key: str, reply: dict[str, Any]) -> None:
        """Stores the reply; a second put of the same key replaces it."""
        file = self._file(self.path, key)
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, json.dumps(reply, ensure_ascii=False, allow_nan=False).encode(), sync=False)

    def __len__(self) -> int:
        return sum(1 for _ in self.path.glob("*/*.json"))
