"""Content ids and seeds: the two places where identity and chance come from.

An id is the first 16 hex digits of the SHA-256 of canonical JSON. A seed is derived from the run's seed and the
names of what it is for, so that neither the order of work nor the number of workers changes what is drawn.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any


def canonical_json(value: Any) -> str:
    """`value` as canonical JSON: sorted keys, separators `,` and `:`, no ASCII escapes. NaN is refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of `value`'s canonical JSON in UTF-8."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def seed_for(run_seed: int, *parts: str | int) -> int:
    """A seed in [0, 2^31) for (run seed, item, stage, attempt, ...): equal parts give equal seeds everywhere."""
    digest = hashlib.sha256(canonical_json([run_seed, *parts]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def rng_for(run_seed: int, *parts: str | int) -> random.Random:
    """A generator seeded by `seed_for`."""
    return random.Random(seed_for(run_seed, *parts))
