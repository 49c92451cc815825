"""What every graph of ours gets at run time: the clients, made by the caller, and the knobs of one run.

A graph never makes a client. The caller (a verb, the trainer, `graphs/studio.py`) puts one per role into `clients`,
with `default` for the roles that have none of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from astrolabe.records.errors import UsageError

if TYPE_CHECKING:
    from serving.chat import ChatClient


@dataclass(kw_only=True)
class Context:
    """Runtime context of the agents' graphs; all fields have defaults, so that a form can be made of it."""

    clients: dict[str, Any] = field(default_factory=dict)
    """role -> `serving.chat.ChatClient`; `default` answers for every other role."""
    seed: int = 0
    language: str = "en"
    """Language of the prompts, where a request does not name its own."""
    max_repairs: int = 2
    """How often a reply that does not validate is shown its error and asked for again."""

    def client(self, role: str) -> ChatClient:
        """The client of a role. UsageError if neither it nor a default was given."""
        found = self.clients.get(role) or self.clients.get("default")
        if found is None:
            raise UsageError(f"no model server for the role {role!r}", "give --model-url, or run with the teacher")
        return found
