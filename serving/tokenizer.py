"""A tokenizer from a `tokenizer.json`, with the border between template and content drawn in the text itself.

Added tokens (control tokens such as `<|im_end|>`, and whole fragments of the template) may only come from the template.
Content is fenced (`fence`) before it is put into the template: inside a fence no added token is recognised. Tool
schemas are guarded (`guard`): control tokens in them are broken up, other added tokens are recognised. Fences vanish
before the bytes are encoded, so template and content between two added tokens are one BPE pass, as in the template
that the model was trained on.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from astrolabe.records.errors import UsageError

OPEN, CLOSE, BREAK = "\ufdd0", "\ufdd1", "\ufdd2"
"""Unicode noncharacters: never in interchanged text; where they are, they become U+FFFD."""
_MARKS = re.compile(f"[{OPEN}{CLOSE}{BREAK}]")
_TAG = re.compile(r"</?[^\s<>]+>|\[/?[A-Z_]+\]")
_LONGEST_CACHED = 20_000


class TextTokenizer:
    """Encoding with added tokens (`encode`) and without (`encode_plain`), and exact decoding. Needs no transformers."""

    unk_token_id = None

    def __init__(self, source: str, name_or_path: str = "tokenizer") -> None:
        """`source` is the content of a `tokenizer.json`. UsageError if it cannot be used here."""
        self.name_or_path = name_or_path
        try:
            spec = json.loads(source)
            added: list[dict[str, Any]] = spec.get("added_tokens") or []
            self._full = Tokenizer.from_str(source)
            self._plain = Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise UsageError(
                f"{name_or_path}: not a tokenizer.json: {error}", "take the one that came with the model"
            ) from None
        stripping = [t["content"] for t in added if t.get("lstrip") or t.get("rstrip") or t.get("single_word")]
        if stripping:
            raise UsageError(
                f"{name_or_path}: added tokens that take spaces with them are not supported: {stripping[:3]}",
                "set lstrip, rstrip and single_word to false",
            )
        self.added: dict[str, int] = {t["content"]: t["id"] for t in added}
        self._added_text = {number: text for text, number in self.added.items()}
        tags = [t["content"] for t in added if t.get("special") or _TAG.fullmatch(t["content"])]
        self.control: dict[str, int] = {
            text: number for text, number in self.added.items() if any(tag in text for tag in tags)
        }
        """Added tokens that mean something to the template or the parser."""
        self._control_ids = frozenset(self.control.values())
        self._added_re = _alternatives(self.added)
        self._control_re = _alternatives(self.control)
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        self._cached = functools.lru_cache(maxsize=8192)(self._encode_marked)

    @classmethod
    def from_folder(cls, folder: Path | str) -> TextTokenizer:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"no tokenizer.json in {folder}", "give a Hugging Face model folder")
        return cls(path.read_text(encoding="utf-8"), str(folder))

    # -- marking ----------------------------------------------------------------------------------------------------

    @staticmethod
    def fence(text: str) -> str:
        """`text` as content: whatever it says, it encodes to no added token."""
        return OPEN + _clean(text) + CLOSE if text else ""

    def guard(self, value: Any) -> Any:
        """JSON `value` (tool schemas) with every control token inside its strings and keys broken up."""
        text = json.dumps(value, ensure_ascii=False)
        if not _MARKS.search(text) and not (self._control_re and self._control_re.search(text)) and encodable(text):
            return value
        return self._guard(value)

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            text = _clean(value)
            return self._control_re.sub(lambda m: m[0][0] + BREAK + m[0][1:], text) if self._control_re else text
        if isinstance(value, dict):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        return [self._guard(item) for item in value] if isinstance(value, list) else value

    # -- encoding ---------------------------------------------------------------------------------------------------

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` with no added token recognised in it."""
        return self.encode(self.fence(text))

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Ids of marked `text`: added tokens are recognised outside fences. Nothing is put before or after it."""
        return list(self._lookup(text)[0])

    def __call__(self, text: str, **_: Any) -> dict[str, Sequence[Any]]:
        """Ids and the place of each in marked `text`; the form in which `renderers` asks for it."""
        ids, starts = self._lookup(text)
        return {"input_ids": ids, "offset_mapping": [(start, start + 1) for start in starts]}

    def _lookup(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._cached(text) if len(text) <= _LONGEST_CACHED else self._encode_marked(text)

    def _encode_marked(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids, place in `text` of each id's first character). Between added tokens: one BPE pass."""
        ids: list[int] = []
        starts: list[int] = []
        run: list[tuple[int, str]] = []  # pieces of the pending pass, with their places

        def flush() -> None:
            joined = "".join(piece for _, piece in run)
            if joined:
                encoded = self._plain.encode(joined, add_special_tokens=False)
                if not self._control_ids.isdisjoint(encoded.ids):
                    raise UsageError(
                        f"{self.name_or_path}: its vocabulary spells a control token out of plain text",
                        "make control tokens added tokens that the model's own vocabulary cannot reach",
                    )
                ids.extend(encoded.ids)
                starts.extend(_places([start for start, _ in encoded.offsets], run))
            run.clear()

        def template(start: int, piece: str) -> None:
            last = 0
            for match in self._added_re.finditer(piece) if self._added_re else ():
                run.extend(_unbroken(start + last, piece[last : match.start()]))
                flush()
                ids.append(self.added[match[0]])
                starts.append(start + match.start())
                last = match.end()
            run.extend(_unbroken(start + last, piece[last:]))

        at = 0
        for index, part in enumerate(text.split(OPEN)):
            if index:
                at += 1
                inner, _, part_after = part.partition(CLOSE)
                run.append((at, inner))
                template(at + len(inner) + 1, part_after)
            else:
                template(at, part)
            at += len(part)
        flush()
        return tuple(ids), tuple(starts)

    # -- decoding ---------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of `ids`, control tokens included. Bytes that are no UTF-8 become U+FFFD."""
        out: list[str] = []
        run: list[int] = []
        for token in ids:
            text = self._added_text.get(token)
            if text is None:
                run.append(token)
                continue
            if run:
                out.append(self._plain.decode(run, skip_special_tokens=False))
                run = []
            if not (skip_special_tokens and token in self._control_ids):
                out.append(text)
        if run:
            out.append(self._plain.decode(run, skip_special_tokens=False))
        return "".join(out)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._full.token_to_id(token)

    def token_text(self, token: int) -> str:
        """One id as text, for display."""
        return self.decode([token])


def _alternatives(texts: dict[str, int]) -> re.Pattern[str] | None:
    """Matches the longest of `texts` at the leftmost place, as the tokenizer's own splitting does."""
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True))) if texts else None


def encodable(text: str) -> bool:
    """Whether the text can be stored: a lone surrogate (`\\ud800` in JSON) cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _clean(text: str) -> str:
    """`text` without our marks and without lone surrogates, which no tokenizer takes."""
    text = _MARKS.sub("\ufffd", text)
    return text if encodable(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unbroken(start: int, piece: str) -> list[tuple[int, str]]:
    """`piece` at place `start`, split at the marks that `guard` put in."""
    out = []
    for part in piece.split(BREAK):
        if part:
            out.append((start, part))
        start += len(part) + 1
    return out


def _places(starts: list[int], run: list[tuple[int, str]]) -> list[int]:
    """Places in the marked text of offsets into the pieces' joined text. Offsets come in order."""
    out: list[int] = []
    index, begin = 0, 0
    for start in starts:
        while index + 1 < len(run) and start >= begin + len(run[index][1]):
            begin += len(run[index][1])
            index += 1
        out.append(run[index][0] + start - begin)
    return out
