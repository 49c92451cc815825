"""English identifiers for the Chinese words of the project's knowledge: tool and parameter names are ASCII.

A word that is not listed gets a name from its hash, so that a tool always has one, the same everywhere.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from astrolabe.records.ids import content_hash

QUANTITY_NAMES = {
    "小时": "hours",
    "公斤": "kilos",
    "晚": "nights",
    "天": "days",
    "张": "tickets",
    "件": "items",
    "人": "people",
    "月": "months",
    "次": "times",
    "页": "pages",
    "份": "portions",
    "箱": "boxes",
    "位": "places",
    "包": "packs",
    "杯": "cups",
    "盒": "cartons",
    "课": "lessons",
}

KNOWLEDGE_WORDS = Path(__file__).parents[2] / "astrolabe" / "data" / "knowledge" / "words_zh.json"
WORDS: dict[str, str] = json.loads(KNOWLEDGE_WORDS.read_text(encoding="utf-8")) if KNOWLEDGE_WORDS.exists() else {}
"""Chinese phrase -> English words: those of the project's knowledge, and what `register` adds."""


def register(words: dict[str, str]) -> None:
    """Add phrases with their English words."""
    WORDS.update(words)


def identifier(phrase: str) -> str:
    """A Python identifier for a phrase: its English words joined by `_`."""
    words = WORDS.get(phrase, phrase)
    name = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    if not name:
        return f"item_{content_hash(phrase)[:4]}"
    return name if name[0].isalpha() else f"item_{name}"
