"""What runs inside a forked child: the tool's namespace, the call, and one line of JSON per call on the reply pipe.

The namespace has an allow-list of builtins and an importer that hands out copies of the permitted modules, without
their private names and the modules that they import. That is tidiness, not the wall: a tool that climbs out of it (by
`__subclasses__`, say) meets the kernel's limits. Standard library only: this file is loaded by path inside the zygote.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import os
import types
from typing import Any

MODULES = (
    "math", "statistics", "decimal", "fractions", "datetime", "re", "json", "itertools", "functools", "collections",
    "string", "unicodedata", "bisect", "heapq",
)  # fmt: skip
# Loaded by the modules above on first use, which is too late once files are out of reach.
_LAZY = ("_strptime", "_pylong", "_pydecimal", "calendar", "locale", "numbers", "copy")
_BY_C = ("_strptime", "_pylong", "time", "warnings")
_ENCODINGS = ("ascii", "latin-1", "utf-8", "utf-8-sig", "utf-16", "utf-32", "gbk", "gb18030", "big5")
_FUNCTIONS = (
    "abs all any ascii bin bool bytearray bytes callable chr classmethod complex dict divmod enumerate filter float "
    "format frozenset hash hex id int isinstance issubclass iter len list map max min next object oct ord pow print "
    "property range repr reversed round set slice sorted staticmethod str sum super tuple type zip "
    "Ellipsis NotImplemented __build_class__"
)
MAX_DEPTH = 100
MAX_BITS = 13_000  # Python reads no integer of more than 4,300 digits
MAX_MESSAGE = 2000
SOURCE_NAME = "<tool>"


class ToolError(Exception):
    """What a tool raises to refuse a call; it is in every tool's namespace."""


class NotJson(Exception):
    """A tool returned, or left in its state, something that is no JSON value."""


def _facade(name: str) -> types.ModuleType:
    """A copy of a module that holds its public names only, and none of the modules that it imports itself."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    copy = types.ModuleType(name)
    for member in names:
        value = getattr(module, member)
        if not isinstance(value, types.ModuleType):
            setattr(copy, member, value)
    return copy


def preload() -> dict[str, types.ModuleType]:
    """Load everything that a tool may come to need, and return the permitted modules by name."""
    for name in _LAZY:
        try:
            importlib.import_module(name)
        except ImportError:  # `_pylong` is of Python 3.12
            continue
    for encoding in _ENCODINGS:
        "a".encode(encoding)
    return {name: _facade(name) for name in MODULES}


def namespace(facades: dict[str, types.ModuleType]) -> dict[str, Any]:
    """A fresh global namespace for tool code."""

    def restricted_import(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if name in _BY_C and isinstance(fromlist, list):
            # C code (strptime, strftime) imports through the importer of whoever called it, then takes the module from
            # sys.modules whatever it got; an import statement gives a tuple or None here.
            return types.ModuleType(name)
        if level or name not in facades:
            raise ImportError(f"{name!r} is not among the modules that a tool may import")
        return facades[name]

    names: dict[str, Any] = {name: getattr(builtins, name) for name in _FUNCTIONS.split()}
    for name, value in vars(builtins).items():
        if isinstance(value, type) and issubclass(value, BaseException):
            names[name] = value
    names["__import__"] = restricted_import
    return {"__builtins__": names, "__name__": "tool", "ToolError": ToolError}


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as a JSON value (tuples become lists). Raises NotJson for anything else: NaN, sets, keys that are no
    strings, text that is not Unicode, nesting beyond 100."""
    if depth > MAX_DEPTH:
        raise NotJson(f"nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise NotJson("an integer of more than 3,900 digits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotJson(f"{value!r} is no JSON number")
        return float(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NotJson("text with a lone surrogate") from None
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain(member, depth + 1) for member in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise NotJson(f"a key of type {type(key).__name__}")
        return {plain(key): plain(member, depth + 1) for key, member in value.items()}
    raise NotJson(f"a value of type {type(value).__name__}")


def _failure(status: str, error: BaseException) -> dict[str, Any]:
    line = None
    if isinstance(error, SyntaxError):
        line = error.lineno
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == SOURCE_NAME:
            line = step.tb_lineno
        step = step.tb_next
    message = str(error).encode("utf-8", "replace").decode()[:MAX_MESSAGE]
    return {"status": status, "message": message, "error_type": type(error).__name__, "line": line}


def _call(
    scope: dict[str, Any], job: dict[str, Any], arguments: dict[str, Any], state: Any
) -> tuple[dict[str, Any], Any]:
    """One call: (reply, state afterwards). A call that fails leaves the state as it was."""
    try:
        function = scope.get(job["function"])
        if not isinstance(function, types.FunctionType):
            raise NameError(f"the code defines no function {job['function']!r}")
        code = function.__code__
        by_keyword = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        extra: dict[str, Any] = {}
        if "data" in by_keyword and "data" not in arguments:
            extra["data"] = json.loads(job["data"])
        takes_state = "state" in by_keyword and "state" not in arguments
        if takes_state:
            extra["state"] = json.loads(json.dumps(state))
        value = plain(function(**arguments, **extra))
        after = plain(extra["state"]) if takes_state else state
        return {"status": "ok", "value": value, "state": after}, after
    except ToolError as error:
        return _failure("tool_error", error), state
    except BaseException as error:  # the tool's, whatever it is: SystemExit and MemoryError too
        return _failure("error", error), state


def serve(job_text: bytes, reply_fd: int, facades: dict[str, types.ModuleType]) -> None:
    """Run the calls of a job and write one line for each.

    The job is `{"code", "function", "calls": [arguments], "data": JSON text, "states": [state] | null, "chain": bool}`.
    """
    job = json.loads(job_text)
    scope = namespace(facades)
    broken: dict[str, Any] | None = None
    try:
        exec(compile(job["code"], SOURCE_NAME, "exec"), scope)
    except ToolError as error:
        broken = _failure("tool_error", error)
    except BaseException as error:
        broken = _failure("error", error)
    state = job["states"][0]
    for index, arguments in enumerate(job["calls"]):
        if not job["chain"]:
            state = job["states"][index]
        reply, after = (broken, state) if broken else _call(scope, job, arguments, state)
        if job["chain"]:
            state = after
        line = json.dumps(reply, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(reply_fd, line) :]
