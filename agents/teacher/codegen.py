"""Tools from a world's attributes and from arithmetic: name, description, schema and code over `data`.

A lookup tool reads one table of `data` and raises ToolError for a key that it does not hold; a dimension, a quantity and
a unit are parameters that change the value. Names and descriptions share the words of the question's phrase; names have
one form per world, descriptions are drawn per tool.
"""

from __future__ import annotations

import keyword
import random
import re
from dataclasses import dataclass
from typing import Any

from agents.teacher.lexicon import QUANTITY_NAMES, WORDS, identifier, register
from agents.teacher.questions import OpName
from agents.teacher.worlds import CONVERSIONS, Attribute, Language, World, article, plural
from astrolabe.records.environment import EnvTool
from astrolabe.records.ids import rng_for

NAME_FORMS = ("{}", "get_{}", "find_{}", "{}_of", "look_up_{}", "{}_lookup", "read_{}", "query_{}")
_DESCRIPTIONS = {
    "en": ("{Phrase} of {owner}.", "Gives the {phrase} of {owner}.", "Looks up the {phrase} of {owner}.",
           "Returns the {phrase} of {owner}.", "Finds the {phrase} of {owner}."),
    "zh": ("查询{owner}的{phrase}。", "返回{owner}的{phrase}。", "给出{owner}的{phrase}。", "{owner}的{phrase}。"),
}  # fmt: skip
_DIMENSION_ZH = {
    "year": "年份",
    "member": "会员",
    "season": "季节",
    "when": "日子",
    "age": "年龄",
    "shift": "时段",
    "trip": "行程",
}
OP_NAMES: dict[str, tuple[str, ...]] = {
    "sum": ("add", "plus", "add_numbers", "sum_of_two"),
    "difference": ("subtract", "minus", "take_away", "difference_of_two"),
    "product": ("multiply", "times", "multiply_numbers", "product_of_two"),
    "percentage": ("percentage", "percent_of", "as_percentage", "share_in_percent"),
    "average": ("average", "mean_of_two", "average_of_two", "midpoint"),
}
_OP_DESCRIPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "en": {
        "sum": ("{a} plus {b}.", "Adds: {a} plus {b}."),
        "difference": ("{a} minus {b}.", "Subtracts: {a} minus {b}."),
        "product": ("{a} times {b}.", "Multiplies: {a} times {b}."),
        "percentage": ("{a} as a percentage of {b}.", "Gives {a} as a percentage of {b}."),
        "average": ("The average of {a} and {b}.", "Gives the average of {a} and {b}."),
    },
    "zh": {
        "sum": ("{a}加上{b}。", "计算{a}加上{b}。"),
        "difference": ("{a}减去{b}。", "计算{a}减去{b}。"),
        "product": ("{a}乘以{b}。", "计算{a}乘以{b}。"),
        "percentage": ("{a}占{b}的百分比。", "计算{a}占{b}的百分比。"),
        "average": ("{a}与{b}的平均值。", "计算{a}与{b}的平均值。"),
    },
}
_OP_CODE = {
    "sum": "    return round({a} + {b}, 6)\n",
    "difference": "    return round({a} - {b}, 6)\n",
    "product": "    return round({a} * {b}, 6)\n",
    "percentage": "    if {b} == 0:\n        raise ToolError({zero})\n    return round(100 * {a} / {b}, 2)\n",
    "average": "    return round(({a} + {b}) / 2, 6)\n",
}
_OPERANDS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"))


_NEAR_ZH = {"计划": "planned", "原": "former", "最大": "maximum", "备用": "spare", "估计": "estimated"}
_NEAR: dict[Language, tuple[str, ...]] = {
    "en": ("planned", "former", "maximum", "spare", "nominal", "estimated"),
    "zh": tuple(_NEAR_ZH),
}


@dataclass(frozen=True)
class BuiltTool:
    """A tool with what turns a step's arguments (by role) into its own."""

    tool: EnvTool
    names: dict[str, str]
    """role ("entity", "year", "unit", "night", "a", ...) -> parameter name."""
    table: str | None = None
    """Its key in `data`."""

    def arguments(self, by_role: dict[str, Any]) -> dict[str, Any]:
        return {self.names[role]: value for role, value in by_role.items()}


def quote(text: str) -> str:
    """A Python string literal with double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def quantity_name(per: str, language: Language) -> str:
    return plural(per) if language == "en" else QUANTITY_NAMES.get(per, "count")


def _safe(name: str, taken: set[str]) -> str:
    while keyword.iskeyword(name) or name in taken or name in ("data", "state", "table", "value"):
        name += "_2" if name in taken else "_name"
    return name


def table_data(attribute: Attribute) -> dict[str, Any]:
    """The attribute's table of `data`: entity -> value, figures by year as pairs (a year is a number, never a key)."""
    if attribute.dimension is not None and attribute.dimension.parameter == "year":
        return {entity: [[int(y), v] for y, v in value.items()] for entity, value in attribute.values.items()}
    return attribute.values


def parameter_names(attribute: Attribute, language: Language) -> dict[str, str]:
    """role ("entity", a dimension, what the figure counts by, "unit") -> parameter name."""
    names = {"entity": _safe(identifier(attribute.owner), set())}
    if attribute.dimension is not None:
        names[attribute.dimension.parameter] = attribute.dimension.parameter
    if attribute.per is not None:
        names[attribute.per] = quantity_name(attribute.per, language)
    if attribute.per is None and attribute.unit in CONVERSIONS[language]:
        names["unit"] = "unit"
    return names


def lookup_schema(attribute: Attribute, language: Language, *, unit: bool) -> dict[str, Any]:
    """The tool's parameters; `unit` adds the optional unit where the attribute has one that converts."""
    properties: dict[str, Any] = {}
    required = []
    for role, name in parameter_names(attribute, language).items():
        if role == "unit":
            if unit:
                properties[name] = {"type": "string", "enum": unit_choices(attribute, language)}
            continue
        required.append(name)
        if role == "entity":
            properties[name] = {"type": "string"}
        elif attribute.dimension is not None and role == attribute.dimension.parameter:
            properties[name] = {"type": attribute.dimension.type}
            if attribute.dimension.type == "string":
                properties[name]["enum"] = [value for _, value in attribute.dimension.phrases[language]]
        else:
            properties[name] = {"type": "integer"}
    return {"type": "object", "properties": properties, "required": required}


def unit_choices(attribute: Attribute, language: Language) -> list[str]:
    """The attribute's unit and the smaller one, or nothing."""
    conversion = CONVERSIONS[language].get(attribute.unit or "") if attribute.per is None else None
    return [attribute.unit or "", conversion[0]] if conversion else []


def lookup_code(name: str, attribute: Attribute, language: Language, *, unit: bool) -> str:
    """Code of the tool `name` over the attribute's table."""
    names = parameter_names(attribute, language)
    owner, english = names["entity"], language == "en"
    signature = [owner]
    unknown = f"unknown {attribute.owner}" if english else f"没有这个{attribute.owner}"
    body = f"    table = data[{quote(identifier(attribute.phrase))}]\n"
    body += f"    if {owner} not in table:\n        raise ToolError({quote(unknown)})\n    value = table[{owner}]\n"
    dimension = attribute.dimension
    if dimension is not None:
        parameter = dimension.parameter
        signature.append(parameter)
        missing = quote(f"no figure for this {parameter}" if english else f"没有这个{_DIMENSION_ZH[parameter]}的数据")
        if parameter == "year":
            body += f"    figures = [figure for known, figure in value if known == year]\n    if not figures:\n        raise ToolError({missing})\n    value = figures[0]\n"
        else:
            key = f'"true" if {parameter} else "false"' if dimension.type == "boolean" else parameter
            body += f"    key = {key}\n    if key not in value:\n        raise ToolError({missing})\n    value = value[key]\n"
    if attribute.per is not None:
        count = names[attribute.per]
        signature.append(count)
        wrong = quote(f"{count} must be 1 to 60" if english else f"{attribute.per}数须在1到60之间")
        body += f"    if {count} < 1 or {count} > 60:\n        raise ToolError({wrong})\n    value = round(value * {count}, 6)\n"
    if unit:
        smaller, factor = CONVERSIONS[language][attribute.unit or ""]
        signature.append(f"unit={quote(attribute.unit or '')}")
        body += f"    if unit == {quote(smaller)}:\n        value = round(value * {factor}, 6)\n"
    return f"def {name}({', '.join(signature)}, *, data):\n{body}    return value\n"


def _as_pattern(form: str) -> re.Pattern[str]:
    """The regular expression of a description form, its fields as groups."""
    text = re.escape(form)
    for name in ("phrase", "Phrase", "owner", "a", "b"):
        text = text.replace(rf"\{{{name}\}}", f"(?P<{name}>.+)")
    return re.compile(text, re.IGNORECASE)


_PHRASE_PATTERNS = {language: [_as_pattern(form) for form in forms[::-1]] for language, forms in _DESCRIPTIONS.items()}
_OP_PATTERNS = {
    language: [(op, _as_pattern(form)) for op, forms in ops.items() for form in forms[::-1]]
    for language, ops in _OP_DESCRIPTIONS.items()
}


def phrase_of_description(description: str, language: Language) -> str | None:
    """The phrase that a lookup tool's description is about, or None: "Finds the wing span of a plane." -> "wing span"."""
    description = re.sub(
        r" for some [a-z]+\.$" if language == "en" else r"，按[\u4e00-\u9fff]+数。$", description[-1:], description
    )
    for pattern in sorted(_PHRASE_PATTERNS[language], key=lambda p: -len(p.pattern)):
        match = pattern.fullmatch(description)
        if match:
            found = match.groupdict()
            phrase = found.get("phrase") or found.get("Phrase") or ""
            return phrase if found.get("phrase") else phrase[:1].lower() + phrase[1:]
    return None


def op_of_description(description: str, language: Language) -> OpName | None:
    """The operation that an arithmetic tool's description is about, or None."""
    for op, pattern in sorted(_OP_PATTERNS[language], key=lambda item: -len(item[1].pattern)):
        match = pattern.fullmatch(description)
        if match and all(re.fullmatch(r"[A-Za-z]+", operand) for operand in match.groupdict().values()):
            return op  # type: ignore[return-value]
    return None


def lookup_description(attribute: Attribute, language: Language, rng: random.Random) -> str:
    """One of the description forms, with the question's phrase in it."""
    suffix = ""
    if attribute.per is not None:
        count = quantity_name(attribute.per, language)
        suffix = f" for some {count}" if language == "en" else f"，按{attribute.per}数"
    text = rng.choice(_DESCRIPTIONS[language]).format(
        phrase=attribute.phrase,
        Phrase=attribute.phrase[:1].upper() + attribute.phrase[1:],
        owner=article(attribute.owner) if language == "en" else attribute.owner,
    )
    return text[:-1] + suffix + text[-1]


def name_form(world: World) -> str:
    """How tools are named where `world` is at home ("get_{}"): one way per world, as one server has one."""
    return rng_for(0, "tool names", world.domain, *sorted(world.attributes)).choice(NAME_FORMS)


def tool_name(attribute: Attribute, form: str) -> str:
    """The name of the attribute's tool by a form of `name_form`."""
    return _safe(form.format(identifier(attribute.phrase)), set())


def lookup_tool(attribute: Attribute, world: World, form: str, rng: random.Random, taken: set[str]) -> BuiltTool:
    """A tool for one attribute, named by `form`; its name is added to `taken`."""
    language = world.language
    name = _safe(form.format(identifier(attribute.phrase)), taken)
    taken.add(name)
    unit = bool(unit_choices(attribute, language))
    tool = EnvTool(
        name=name,
        description=lookup_description(attribute, language, rng),
        parameters=lookup_schema(attribute, language, unit=unit),
        code=lookup_code(name, attribute, language, unit=unit),
    )
    return BuiltTool(tool, parameter_names(attribute, language), identifier(attribute.phrase))


def op_code(name: str, op: OpName, language: Language, a: str, b: str) -> str:
    """Code of an arithmetic tool with operands `a` and `b`."""
    zero = quote("the whole must not be zero" if language == "en" else "整体不能为零")
    return f"def {name}({a}, {b}):\n" + _OP_CODE[op].format(a=a, b=b, zero=zero)


def op_tool(op: OpName, language: Language, rng: random.Random, taken: set[str]) -> BuiltTool:
    """An arithmetic tool; its name is added to `taken`."""
    name = _safe(rng.choice(OP_NAMES[op]), taken)
    taken.add(name)
    a, b = rng.choice(_OPERANDS if language == "en" else _OPERANDS[:2])
    parameters = {"type": "object", "properties": {a: {"type": "number"}, b: {"type": "number"}}, "required": [a, b]}
    description = rng.choice(_OP_DESCRIPTIONS[language][op]).format(a=a, b=b)
    if language == "en":
        description = description[:1].upper() + description[1:]
    return BuiltTool(
        EnvTool(name=name, description=description, parameters=parameters, code=op_code(name, op, language, a, b)),
        {"a": a, "b": b},
        None,
    )


def near_variant(attribute: Attribute, world: World, rng: random.Random) -> Attribute | None:
    """A plausible neighbour of a figure ("planned wing span") with values of its own; None for other kinds."""
    if attribute.kind != "number":
        return None
    word = rng.choice(_NEAR[world.language])
    known = {v for value in attribute.values.values() for v in (value.values() if isinstance(value, dict) else [value])}

    def other() -> int:
        while True:
            number = rng.randint(11, 989)
            if number not in known:
                known.add(number)
                return number

    values = {
        entity: {key: other() for key in value} if isinstance(value, dict) else other()
        for entity, value in attribute.values.items()
    }
    phrase = f"{word} {attribute.phrase}"
    if world.language == "zh":
        phrase = word + attribute.phrase
        register({phrase: f"{_NEAR_ZH[word]} {WORDS.get(attribute.phrase, identifier(attribute.phrase))}"})
    return Attribute(
        phrase, attribute.owner, "number", None, attribute.unit, attribute.per, attribute.dimension, values
    )
