"""The static rules of tool code: what may stand in it, read off its syntax tree; nothing is run.

The rules keep tools simple, repeatable and free of state between calls. They are no wall: the sandbox is, and holds
without them. A name is banned where it means the builtin; a parameter that happens to be called `input` is not.
"""

from __future__ import annotations

import ast
import importlib
import re
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from astrolabe.envs.sandbox_child import MODULES

MAX_CODE = 64_000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BANNED_BUILTINS = _words(
    """
    eval exec compile open input getattr setattr delattr hasattr globals locals vars dir breakpoint
    memoryview help exit quit copyright credits license __import__
    """
)
# Clocks, chance, frames, and ways to read an attribute by name.
BANNED_ATTRIBUTES = _words(
    """
    now today utcnow samples Formatter f_back f_globals f_locals f_builtins f_code gi_frame gi_code
    gi_yieldfrom cr_frame cr_code ag_frame ag_code tb_frame tb_next tb_lasti co_code mro lru_cache cache
    cached_property
    """
)
_NAMED_TUPLE = frozenset({"_asdict", "_replace", "_fields", "_make", "_field_defaults"})
_MUTATORS = _words(
    """
    append extend insert pop popitem popleft appendleft extendleft remove clear update setdefault add discard
    sort reverse rotate subtract move_to_end intersection_update difference_update
    symmetric_difference_update __setitem__
    """
)
# Functions that change their first argument, or use it up.
_CONSUMERS = _words("next heappush heappop heapify heapreplace heappushpop insort insort_left insort_right")
_FORMAT_DUNDER = re.compile(r"\{[^{}]*__")
_TOP_LEVEL = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign)
_FORBIDDEN_NODES: dict[type[ast.AST], str] = {
    ast.ClassDef: "a class",
    ast.AsyncFunctionDef: "an async function",
    ast.Await: "await",
    ast.AsyncFor: "async for",
    ast.AsyncWith: "async with",
    ast.Global: "a global statement",
}

_MAKES_OBJECTS = (ast.List, ast.Dict, ast.Set, ast.Call, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)

Function = ast.FunctionDef | ast.Lambda
_Scope = ast.FunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def check_code(code: str, name: str, parameters: dict[str, Any] | None = None) -> list[str]:
    """Violations of the static rules (gate `unsafe_code`), each with its line, in order; empty if there are none.

    `parameters` is not needed for these: the signature is `check_signature`'s.
    """
    try:
        tree = _parse(code)
    except SyntaxError as error:
        return [f"line {error.lineno or 0}: does not parse: {error.msg}"]
    except (ValueError, RecursionError, MemoryError) as error:
        return [f"line 0: does not parse: {error}"]
    top = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    found = [(0, f"{len(top)} top-level functions are called {name!r}")] if len(top) > 1 else []
    found += _Checker(tree).violations()
    return [f"line {line}: {text}" for line, text in sorted(set(found))]


def check_signature(code: str, name: str, parameters: dict[str, Any], *, stateful: bool = True) -> list[str]:
    """Where the function's signature differs from its schema (gate `signature_mismatch`); empty if they are equal.

    Every property is a parameter that can be given by name, and the other way round; what may be left out in the call
    has a default. `data` (and `state`, if `stateful`) may stand beside them as keyword-only parameters.
    """
    try:
        tree = _parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ["the code does not parse"]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        return [f"the code has no top-level function {name!r}"]
    arguments = functions[-1].args
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    faults = []
    if arguments.posonlyargs:
        faults.append("positional-only parameters cannot be given by name")
    if arguments.vararg or arguments.kwarg:
        faults.append("*args and **kwargs take what the schema does not know")
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = {a.arg for a in positional[len(positional) - len(arguments.defaults) :]}
    with_default |= {
        a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is not None
    }
    injected = {"data", "state"} if stateful else {"data"}
    by_keyword = {a.arg for a in arguments.kwonlyargs}
    own = [a.arg for a in [*positional, *arguments.kwonlyargs]]
    own = [arg for arg in own if arg in properties or not (arg in injected and arg in by_keyword)]
    faults += [f"the schema has no property {arg!r}" for arg in own if arg not in properties]
    faults += [f"the function has no parameter {prop!r}" for prop in properties if prop not in own]
    faults += [
        f"{arg!r} is optional in the schema and has no default"
        for arg in own
        if arg in properties and arg not in required and arg not in with_default
    ]
    return faults


def _parse(code: str) -> ast.Module:
    if len(code) > MAX_CODE:
        raise ValueError(f"longer than {MAX_CODE} characters")
    return ast.parse(code)  # names come out NFKC-folded, so what the walk sees is what would run


@lru_cache(maxsize=len(MODULES))
def _public_names(module: str) -> frozenset[str]:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [n for n in vars(loaded) if not n.startswith("_")]
    return frozenset(n for n in names if not isinstance(getattr(loaded, n), types.ModuleType))


def _bound_names(scope: ast.AST) -> set[str]:
    """Names that a function, lambda or comprehension binds itself (not those of scopes within it)."""
    names: set[str] = set()
    if isinstance(scope, (ast.FunctionDef, ast.Lambda)):
        a = scope.args
        names = {p.arg for p in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]}
    for node in _own_nodes(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            names |= {node.name} if node.name else set()
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Nonlocal):
            names |= set(node.names)
    return names


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes below `scope`, not going into functions, lambdas or comprehensions inside it."""
    stack = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, _Scope):
            stack.extend(ast.iter_child_nodes(node))


def _root(node: ast.expr) -> str | None:
    """The name at the bottom of `name.attribute[index]...`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


class _Checker:
    """One walk that knows which names are local where it stands."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.found: list[tuple[int, str]] = []
        self.module_names = _bound_names(tree)
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        aliases = [alias for node in imports if isinstance(node, ast.Import) for alias in node.names]
        self.modules = {alias.asname or alias.name: alias.name for alias in aliases}
        self.imported = {alias.asname or alias.name for node in imports for alias in node.names}

    def violations(self) -> list[tuple[int, str]]:
        for index, node in enumerate(self.tree.body):
            docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not isinstance(node, _TOP_LEVEL) and not docstring:
                self._report(
                    node, f"{type(node).__name__} at the top level; only imports, constants and functions may be"
                )
            if isinstance(node, ast.AnnAssign) and node.value is None:
                self._report(node, "a name without a value at the top level")
        self._walk(self.tree, frozenset())
        return self.found

    def _report(self, node: ast.AST, text: str) -> None:
        self.found.append((getattr(node, "lineno", 0), text))

    def _walk(self, tree: ast.AST, outermost: frozenset[str]) -> None:
        # A stack, not recursion: `1+1+1+...` parses into a tree deeper than Python's own stack.
        stack: list[tuple[ast.AST, frozenset[str]]] = [(tree, outermost)]
        while stack:
            node, local = stack.pop()
            self._check(node, local)
            if isinstance(node, _Scope):
                local = local | _bound_names(node)
            stack.extend((child, local) for child in ast.iter_child_nodes(node))

    def _check(self, node: ast.AST, local: frozenset[str]) -> None:
        for kind, text in _FORBIDDEN_NODES.items():
            if isinstance(node, kind):
                self._report(node, f"{text} is not allowed")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._check_import(node)
        elif isinstance(node, ast.FunctionDef):
            if node.decorator_list:
                self._report(node, f"{node.name!r} has a decorator")
            self._check_name(node, node.name, local, binding=True)
            self._check_defaults(node)
        elif isinstance(node, ast.Lambda):
            self._check_defaults(node)
        elif isinstance(node, ast.arg):
            self._check_name(node, node.arg, local, binding=True)
        elif isinstance(node, ast.Name):
            self._check_name(node, node.id, local, binding=not isinstance(node.ctx, ast.Load))
        elif isinstance(node, ast.Attribute):
            self._check_attribute(node, local)
        elif isinstance(node, ast.Subscript):
            self._check_store(node, local)
        elif isinstance(node, ast.AugAssign):
            self._check_store(node.target, local)
        elif isinstance(node, ast.Call):
            self._check_call(node, local)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and _FORMAT_DUNDER.search(node.value):
                self._report(node, "a format string reaches for a dunder attribute")
        elif isinstance(node, ast.MatchClass):
            for attribute in node.kwd_attrs:
                self._check_private(node, attribute)
        elif isinstance(node, ast.keyword) and node.arg and node.arg.startswith("__"):
            self._report(node.value, f"the dunder keyword {node.arg!r}")

    def _check_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in MODULES:
                    self._report(node, f"import of {alias.name!r}, which is not among the permitted modules")
            return
        if node.level or node.module not in MODULES:
            self._report(node, f"import from {node.module!r}, which is not among the permitted modules")
            return
        for alias in node.names:
            if alias.name == "*":
                self._report(node, "a star import")
            elif alias.name not in _public_names(node.module) or alias.name in BANNED_ATTRIBUTES:
                self._report(node, f"import of {alias.name!r} from {node.module!r}")

    def _check_name(self, node: ast.AST, name: str, local: frozenset[str], *, binding: bool) -> None:
        if name.startswith("__"):
            self._report(node, f"the dunder name {name!r}")
        elif not binding and name in BANNED_BUILTINS and name not in local and name not in self.module_names:
            self._report(node, f"use of {name!r}")

    def _check_private(self, node: ast.AST, attribute: str) -> None:
        if attribute.startswith("_") and attribute not in _NAMED_TUPLE:
            self._report(node, f"the private attribute {attribute!r}")

    def _check_attribute(self, node: ast.Attribute, local: frozenset[str]) -> None:
        self._check_private(node, node.attr)
        root = _root(node.value)
        if node.attr in BANNED_ATTRIBUTES:
            self._report(node, f"the attribute {node.attr!r} (clock, chance, frame or memory)")
        elif isinstance(node.value, ast.Name) and root in self.modules and root not in local:
            module = self.modules[root]
            if module in MODULES and node.attr not in _public_names(module):
                self._report(node, f"{module}.{node.attr} is not public")
        self._check_store(node, local)

    def _check_store(self, node: ast.expr, local: frozenset[str]) -> None:
        """State kept between calls: a store into anything that belongs to the module."""
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            root = _root(node)
            if root in self.module_names and root not in local:
                self._report(node, f"a change of the module's {root!r} would be kept between calls")

    def _check_call(self, node: ast.Call, local: frozenset[str]) -> None:
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
        if called == "type" and (len(node.args) != 1 or node.keywords):
            self._report(node, "type() with more than one argument makes a class")
        changed: str | None = None
        if isinstance(function, ast.Attribute) and called in _MUTATORS:
            changed = _root(function.value)
        elif called in _CONSUMERS and node.args:
            changed = _root(node.args[0])
        if changed in self.module_names and changed not in local and changed not in self.imported:
            self._report(node, f"a change of the module's {changed!r} would be kept between calls")

    def _check_defaults(self, node: Function) -> None:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            if any(isinstance(part, _MAKES_OBJECTS) for part in ast.walk(default)):
                self._report(default, "a default that can be changed would be kept between calls")
