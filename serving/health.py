"""Whether a model server answers at all, told from a request that failed for a reason of its own.

A proxy before a crashed server answers 502 to everything: item by item, a run would reject its whole input.
"""

from __future__ import annotations

from astrolabe.records.errors import ServerError

LIMIT = 8
"""Requests in a row that failed, each after its own retries, before the server is taken to be down."""


class Health:
    """Counts failed requests since the last good one. Of one event loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._failed = 0

    def good(self) -> None:
        self._failed = 0

    def failed(self, kind: str, message: str) -> None:
        """ServerError, in place of the request's own, once it is the server that fails. A request that was refused
        (`bad_request`) counts as an answer."""
        if kind == "bad_request":
            self._failed = 0
            return
        self._failed += 1
        if self._failed >= LIMIT:
            raise ServerError(
                f"{self._address}: {self._failed} requests failed one after another, the last with: {message}",
                "see the server's log; the same command goes on once it answers",
            )
