"""The teacher as emulator: plays any server from its documents, by the verb and the noun of a tool's name.

Things have an id and live in the state: what was created can be listed, what was deleted is gone. A thing that was never
seen before is made from a hash of (server, noun, id), so the same thing looks the same in every episode. A result holds,
under their own names, the values that other tools of the server need from it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from agents.teacher.planter import Planter
from agents.teacher.registry import CannotAnswer, program
from agents.teacher.values import make_value
from agents.tool_docs import properties, reference_nouns, required, resolve, stem, words, yields
from astrolabe.records.ids import rng_for
from astrolabe.records.messages import FunctionSchema

_VERBS = {
    "create": "create add new open start launch init initialize register insert post upload record begin make build "
    "clone save import connect join send submit place book schedule write append 创建 添加 启动 打开 新建 发送 写入",
    "delete": "delete remove cancel close stop kill end clear drop uninstall unregister destroy abort leave "
    "disconnect 删除 移除 关闭 停止 取消",
    "update": "update set edit change modify rename move enable disable toggle mark assign resize replace patch "
    "configure switch pause resume 更新 设置 编辑 修改 移动",
    "list": "list search find browse discover query all lookup 列出 搜索 查找",
    "get": "get fetch read retrieve show view describe check status info latest load take snapshot return returns "
    "获取 查询 读取 查看",
}
_VERB_OF = {word: verb for verb, text in _VERBS.items() for word in text.split()}
_SKIPPED = frozenset(
    [
        "a",
        "an",
        "the",
        "of",
        "for",
        "to",
        "in",
        "on",
        "by",
        "with",
        "and",
        "or",
        "from",
        "all",
        "as",
        "into",
        "tool",
        "tools",
        "data",
        "info",
        "details",
    ]
)
_IDENTITY = ("id", "uuid", "name", "title", "path", "url", "symbol", "domain", "slug", "key", "address", "username")
_WORDS = (
    "amber",
    "basalt",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "garnet",
    "harbor",
    "indigo",
    "juniper",
    "kestrel",
    "lumen",
)
_STATUSES = ("active", "ready", "pending", "complete")
_MAX_TEXT = 80


@dataclass(frozen=True)
class Server:
    name: str
    tools: tuple[FunctionSchema, ...]

    def rng(self, *parts: Any) -> random.Random:
        """A generator for one thing of this server, the same in every episode."""
        return rng_for(0, "emulator", self.name, *(str(part) for part in parts))


def verb_and_noun(tool: FunctionSchema) -> tuple[str, str]:
    """(create | update | delete | list | get | compute, what it is about)."""
    parts = words(tool.name)
    verb = next((_VERB_OF[word] for word in parts if word in _VERB_OF), None)
    if verb is None:
        verb = next((_VERB_OF[w] for w in map(_bare, words(tool.description[:40])[:2]) if w in _VERB_OF), "compute")
    nouns = [stem(word) for word in parts if word not in _VERB_OF and word not in _SKIPPED and not word.isdigit()]
    return verb, nouns[-1] if nouns else "item"


def _bare(word: str) -> str:
    """`creates` -> `create`."""
    return word[:-1] if word.endswith("s") and word[:-1] in _VERB_OF else word


def _short(value: Any) -> Any:
    """A value short enough to stand in a result: texts are cut between words, lists after three members."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT].rsplit(" ", 1)[0]
    if isinstance(value, list):
        return [_short(member) for member in value[:3]]
    if isinstance(value, dict):
        return {key: _short(member) for key, member in list(value.items())[:6]}
    return value


def _new_id(rng: random.Random) -> str:
    """Decimal digits: an id that fits a schema of text as well as one of integers."""
    return str(rng.randrange(100_000, 999_999))


def identity(tool: FunctionSchema, arguments: dict[str, Any]) -> str | None:
    """The argument that says which thing is meant: an id first, then a name, a path and the like."""
    given = [name for name, value in arguments.items() if isinstance(value, (str, int)) and not isinstance(value, bool)]
    for name in given:
        if reference_nouns(name, tool):
            return name
    for last in _IDENTITY:
        for name in given:
            if (words(name) or [""])[-1] == last:
                return name
    return given[0] if given and given[0] in required(tool) else None


def _thing(server: Server, noun: str, key: str) -> dict[str, Any]:
    """A thing that was there before the episode."""
    rng = server.rng("thing", noun, key)
    return {
        "id": key if key.isdecimal() else _new_id(rng),
        "name": f"{rng.choice(_WORDS)} {noun}",
        "status": rng.choice(_STATUSES),
        "value": rng.randrange(10, 2000) / rng.choice((1, 1, 10)),
        "updated": f"2025-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}",
    }


def _needed_by_others(server: Server, tool: FunctionSchema, key: Any) -> dict[str, Any]:
    """The values that other tools take from this one's result, under those tools' argument names."""
    found: dict[str, Any] = {}
    for consumer in server.tools:
        for argument, schema in properties(consumer).items():
            if argument in found or argument == "id" or not yields(tool, argument, consumer):
                continue
            rng = server.rng("needed", tool.name, argument, key)
            try:
                value = make_value(argument, resolve(schema, consumer), consumer, rng)
            except ValueError:  # nothing that could be stated
                continue
            found[argument] = (
                value if not isinstance(value, str) or reference_nouns(argument, consumer) else _short(value)
            )
    return dict(list(found.items())[:6])


class Play:
    """One call against the state; the state that came is never changed, a copy goes back."""

    def __init__(self, server: Server, tool: FunctionSchema, arguments: dict[str, Any], state: dict[str, Any]) -> None:
        self.server, self.tool, self.arguments = server, tool, arguments
        self.verb, self.noun = verb_and_noun(tool)
        self.things = {noun: {k: dict(v) for k, v in kept.items()} for noun, kept in state.get("things", {}).items()}
        self.gone = {noun: list(keys) for noun, keys in state.get("gone", {}).items()}
        self.made = int(state.get("made", 0))

    def state(self) -> dict[str, Any]:
        return {"things": self.things, "gone": self.gone, "made": self.made}

    def answer(self) -> dict[str, Any]:
        name = identity(self.tool, self.arguments)
        key = str(self.arguments[name]) if name is not None else None
        value: Any
        if self.verb == "create":
            value = self._create(name)
        elif self.verb == "list":
            value = self._list()
        elif self.verb == "compute":
            value = self._compute()
        else:
            if key is not None and key in self.gone.get(self.noun, []):
                return {
                    "status": "error",
                    "value": None,
                    "error": f"{self.noun} {key} not found",
                    "state": self.state(),
                }
            value = getattr(self, f"_{self.verb}")(name, key or "default")
        return {"status": "ok", "value": value, "error": None, "state": self.state()}

    def _own(self) -> dict[str, dict[str, Any]]:
        return self.things.setdefault(self.noun, {})

    def _kept(self, key: str) -> dict[str, Any]:
        """The thing under a key (or whose id or name it is), made if it was never seen."""
        own = self._own()
        for thing in own.values():
            if key in (str(thing.get("id")), thing.get("name")):
                return thing
        return own.setdefault(key, _thing(self.server, self.noun, key))

    def _given(self, but: str | None) -> dict[str, Any]:
        return {name: _short(value) for name, value in self.arguments.items() if name != but and name != "id"}

    def _create(self, name: str | None) -> dict[str, Any]:
        self.made += 1
        rng = self.server.rng("create", self.tool.name, sorted(self.arguments.items(), key=str), self.made)
        # A thing that is made under a key of its own (a path, a name) is found under it again.
        key = str(self.arguments[name]) if name is not None and not reference_nouns(name, self.tool) else _new_id(rng)
        thing = {"id": _new_id(rng), "status": "created", **self._given(None)}
        thing |= {n: v for n, v in _needed_by_others(self.server, self.tool, self.made).items() if n not in thing}
        self._own()[key] = thing
        if key in self.gone.get(self.noun, []):
            self.gone[self.noun].remove(key)
        return dict(thing)

    def _update(self, name: str | None, key: str) -> dict[str, Any]:
        thing = self._kept(key)
        thing |= self._given(name) | {"status": "updated"}
        return self._with_needed(thing, key)

    def _delete(self, name: str | None, key: str) -> dict[str, Any]:
        own = self._own()
        thing = self._kept(key)
        for kept in [k for k, v in own.items() if v is thing]:
            del own[kept]
            self.gone.setdefault(self.noun, []).append(kept)
        if key not in self.gone.setdefault(self.noun, []):
            self.gone[self.noun].append(key)
        return {"id": thing["id"], "status": self.verb + "d", "remaining": len(own)}

    def _get(self, name: str | None, key: str) -> dict[str, Any]:
        return self._with_needed(self._kept(key), key)

    def _with_needed(self, thing: dict[str, Any], key: str) -> dict[str, Any]:
        return dict(thing) | {n: v for n, v in _needed_by_others(self.server, self.tool, key).items() if n not in thing}

    def _list(self) -> dict[str, Any]:
        about = sorted(self.arguments.items(), key=lambda item: item[0])
        rng = self.server.rng("list", self.tool.name, about)
        own = self._own()
        keys = [_new_id(self.server.rng("listed", self.noun, n)) for n in range(rng.randrange(2, 4))]
        gone = self.gone.get(self.noun, [])
        found = [self._kept(key) for key in keys if key not in gone]
        found += [thing for thing in own.values() if thing not in found and thing.get("status") != "removed"]
        limit = next((v for n, v in about if words(n)[-1:] == ["limit"] and isinstance(v, int) and v > 0), 4)
        rows = [self._with_needed(thing, str(thing["id"])) for thing in found[: min(limit, 4)]]
        return {"count": len(rows), f"{self.noun}s": rows}

    def _compute(self) -> dict[str, Any]:
        """No thing is meant: a result that follows from the arguments alone."""
        rng = self.server.rng("compute", self.tool.name, sorted(self.arguments.items(), key=str))
        out: dict[str, Any] = {"result": f"{rng.choice(_WORDS)}-{rng.randrange(1000, 9999)}"}
        out |= {"score": round(rng.random(), 3)} if rng.random() < 0.5 else {"status": "complete"}
        first = next(((n, v) for n, v in self.arguments.items() if isinstance(v, (str, int, float))), None)
        if first is not None and re.fullmatch(r"\w{1,30}", first[0]):
            out |= {first[0]: _short(first[1])}
        return out | _needed_by_others(self.server, self.tool, sorted(self.arguments.items(), key=str))


@program("emulator")
def emulator(request: dict[str, Any], rng: random.Random, plant: Planter) -> dict[str, Any]:
    """Answer one call. The reply depends on the request's content only: no draw, so that a retry gives the same."""
    tools = tuple(FunctionSchema.model_validate(tool) for tool in request["tools"])
    tool = next((tool for tool in tools if tool.name == request["tool"]), None)
    if tool is None:
        raise CannotAnswer(f"the server has no tool {request['tool']!r}")
    return Play(Server(request["server"], tools), tool, request["arguments"], request["state"]).answer()
