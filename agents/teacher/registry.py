"""The teacher's programs: one function per agent, registered by the name that ends the agent's prompt.

Every module of this package is imported once, so a new role is a new file and no list names it.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from agents.teacher.planter import Planter

Program = Callable[[dict[str, Any], random.Random, Planter], "dict[str, Any] | str"]
"""(request, rng, planter) -> the reply as an object, or as a raw text where the program writes a malformed one."""

Turn = Callable[[str, list[dict[str, Any]], list[dict[str, Any]], random.Random, Planter], "dict[str, Any] | None"]
"""(question, tools, messages, rng, planter) -> an assistant message, or None if the question is not this program's."""


class CannotAnswer(Exception):
    """A program has nothing to say to this request; the server answers status 400 with the reason."""


PROGRAMS: dict[str, Program] = {}
TURNS: dict[tuple[int, str], Turn] = {}
"""(order, family) -> program."""


def program(agent: str) -> Callable[[Program], Program]:
    """Register a program for an agent's name. A second one for the same name is a bug (ValueError)."""

    def register(function: Program) -> Program:
        if agent in PROGRAMS:
            raise ValueError(f"two programs answer for {agent!r}")
        PROGRAMS[agent] = function
        return function

    return register


def policy_turn(family: str, order: int = 1) -> Callable[[Turn], Turn]:
    """Register a policy program for one family of questions. Programs are tried by order, then family; the first that
    answers plays the turn, so what recognises its own questions for certain stands before what guesses."""

    def register(function: Turn) -> Turn:
        if (order, family) in TURNS:
            raise ValueError(f"two policy programs for {family!r}")
        TURNS[order, family] = function
        return function

    return register


@cache
def load() -> None:
    """Import every module of the package once; each registers what it answers."""
    import agents.teacher as package

    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in ("server", "registry", "planter"):
            importlib.import_module(f"agents.teacher.{module.name}")
