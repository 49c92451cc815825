"""Endless training worlds: knowledge rows about made-up entities, attributes and relations.

Types, phrases and names are put together from word lists and syllables, so that a policy that learns on them has to
read the tools instead of remembering them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from agents.teacher.lexicon import register
from agents.teacher.texts import write_text
from agents.teacher.worlds import DIMENSIONS, Attribute, Dimension, Language, World
from astrolabe.records.card import KnowledgeRow


@dataclass(frozen=True)
class Vocabulary:
    """What names and phrases are made of. Chinese words carry their English ones for tool names."""

    kinds: tuple[str, ...]
    """Entity types."""
    qualifiers: tuple[str, ...]
    """First words of attribute phrases."""
    figures: tuple[tuple[str, str | None], ...]
    """(last word of a numeric phrase, unit)."""
    labels: tuple[str, ...]
    """Last words of textual phrases: a code, a name, a colour."""
    links: tuple[str, ...]
    """First words of relation phrases; the last is the target's type."""
    rates: tuple[tuple[str, str, str], ...]
    """(last word, unit, what it counts by)."""
    syllables: tuple[str, ...]
    invented: float = 0.35
    """Share of qualifiers that are made of syllables."""


_EN = Vocabulary(
    kinds=tuple(
        ["pilot", "rider", "singer", "baker", "clerk", "nurse", "miner", "scout", "tutor", "farmer", "guard", "potter", "weaver", "trader", "plane", "truck", "ferry", "tram", "van", "barge", "drone", "wagon", "crane", "pump", "kiln", "loom", "press", "robot", "kettle", "printer", "garden", "tower", "mill", "bridge", "depot", "shelf", "studio", "temple", "lodge", "arena", "cabin", "vault", "island", "harbour", "quarry", "orchard", "museum", "clinic", "school", "market", "recipe", "parcel", "ticket", "policy", "course", "ballad", "novel", "poster", "medal", "beetle", "falcon", "otter", "maple", "fern", "comet"]
    ),
    qualifiers=tuple(
        ["wing", "seat", "cargo", "fuel", "roof", "floor", "door", "cabin", "night", "ground", "upper", "lower", "inner", "outer", "front", "rear", "north", "south", "total", "daily", "weekly", "annual", "spring", "autumn", "guest", "crew", "engine", "signal", "water", "steam", "copper", "paper", "glass", "stone", "brush", "timber", "ribbon", "button", "anchor", "ladder", "mirror", "candle", "saddle", "bucket", "filter", "needle", "pocket", "shadow", "summit", "valley", "border", "circle", "corner"]
    ),
    figures=(("span", "metres"), ("length", "metres"), ("height", "metres"), ("range", "kilometres"), ("weight", "kilograms"),
             ("load", "tonnes"), ("volume", "litres"), ("stay", "hours"), ("delay", "minutes"), ("age", "years"),
             ("count", None), ("score", None), ("number", None), ("price", "crowns"), ("cost", "crowns"), ("fee", "crowns"),
             ("tax", "crowns"), ("stock", None), ("rank", None), ("depth", "metres"), ("speed", None), ("output", "tonnes")),
    labels=("code", "key", "mark", "tag", "colour", "badge", "label", "seal", "password", "permit"),
    links=("home", "main", "first", "second", "chosen", "linked", "paired", "parent", "nearest", "usual", "assigned", "old", "new"),
    rates=(("rent", "crowns", "day"), ("rate", "crowns", "night"), ("fare", "crowns", "ticket"), ("wage", "crowns", "hour"),
           ("charge", "crowns", "month")),
    syllables=tuple(["ba", "be", "bo", "da", "do", "el", "fa", "fi", "ga", "go", "ha", "ja", "ka", "ki", "la", "li", "lo", "ma", "mi", "mo", "na", "ne", "no", "or", "pa", "pe", "ra", "re", "ro", "sa", "se", "so", "ta", "ti", "to", "ul", "va", "vi", "vo", "wa", "ya", "zo", "zu"]),
)  # fmt: skip

_ZH_KINDS = {
    "飞行员": "pilot", "歌手": "singer", "面包师": "baker", "护士": "nurse", "矿工": "miner", "教师": "teacher", "农户": "farmer",
    "织工": "weaver", "商人": "trader", "卡车": "truck", "渡轮": "ferry", "电车": "tram", "货船": "barge", "水泵": "pump",
    "窑炉": "kiln", "机器人": "robot", "花园": "garden", "水塔": "tower", "磨坊": "mill", "大桥": "bridge", "车库": "depot",
    "寺院": "temple", "旅舍": "lodge", "岛屿": "island", "港口": "harbour", "果园": "orchard", "展馆": "museum", "诊所": "clinic",
    "市集": "market", "菜谱": "recipe", "包裹": "parcel", "课程": "course", "小说": "novel", "奖章": "medal", "水獭": "otter",
    "枫树": "maple", "彗星": "comet",
}  # fmt: skip
_ZH_QUALIFIERS = {
    "机翼": "wing", "座位": "seat", "货舱": "cargo", "燃料": "fuel", "屋顶": "roof", "地面": "ground", "门口": "door", "上层": "upper",
    "下层": "lower", "内部": "inner", "外部": "outer", "前部": "front", "后部": "rear", "北侧": "north", "南侧": "south", "每日": "daily",
    "每周": "weekly", "全年": "annual", "春季": "spring", "秋季": "autumn", "来客": "guest", "船员": "crew", "引擎": "engine",
    "信号": "signal", "水路": "water", "蒸汽": "steam", "铜件": "copper", "纸张": "paper", "玻璃": "glass", "石料": "stone",
    "木料": "timber", "蜡烛": "candle", "镜面": "mirror", "山顶": "summit", "山谷": "valley", "边界": "border", "转角": "corner",
}  # fmt: skip
_ZH_FIGURES: dict[str, tuple[str, str | None]] = {
    "跨度": ("span", "米"), "长度": ("length", "米"), "高度": ("height", "米"), "航程": ("range", "公里"), "重量": ("weight", "公斤"),
    "载量": ("load", "吨"), "容量": ("volume", "升"), "时长": ("duration", "小时"), "延误": ("delay", "分钟"), "数量": ("count", None),
    "评分": ("score", None), "编号数": ("number", None), "价格": ("price", "元"), "费用": ("fee", "元"), "税额": ("tax", "元"),
    "库存": ("stock", None), "排名": ("rank", None), "深度": ("depth", "米"), "产量": ("output", "吨"),
}  # fmt: skip
_ZH_LABELS = {"代码": "code", "暗号": "password", "标签": "label", "印章": "seal", "许可号": "permit", "徽号": "badge"}
_ZH_LINKS = {
    "所属": "home",
    "主要": "main",
    "首选": "first",
    "备选": "second",
    "对应": "linked",
    "相邻": "nearest",
    "常用": "usual",
    "新": "new",
}
_ZH_RATES = {
    "租金": ("rent", "元", "天"),
    "房价": ("rate", "元", "晚"),
    "票款": ("fare", "元", "张"),
    "工钱": ("wage", "元", "小时"),
}
_ZH_SYLLABLES = tuple("安百川东方高海江金兰林明宁平青山石松田文西溪湘阳云长竹泽")

_ZH = Vocabulary(
    kinds=tuple(_ZH_KINDS),
    qualifiers=tuple(_ZH_QUALIFIERS),
    figures=tuple((word, unit) for word, (_, unit) in _ZH_FIGURES.items()),
    labels=tuple(_ZH_LABELS),
    links=tuple(_ZH_LINKS),
    rates=tuple((word, unit, per) for word, (_, unit, per) in _ZH_RATES.items()),
    syllables=_ZH_SYLLABLES,
    invented=0.0,
)
_ZH_WORDS = (
    _ZH_KINDS
    | _ZH_QUALIFIERS
    | _ZH_LABELS
    | _ZH_LINKS
    | {word: english for word, (english, _) in _ZH_FIGURES.items()}
    | {word: english for word, (english, _, _) in _ZH_RATES.items()}
)
register(_ZH_WORDS)


def default_vocabulary(language: Language) -> Vocabulary:
    return _EN if language == "en" else _ZH


def _join(first: str, second: str, language: Language) -> str:
    if language == "en":
        return f"{first} {second}"
    register({first + second: f"{_ZH_WORDS.get(first, first)} {_ZH_WORDS.get(second, second)}"})
    return first + second


def _invented(rng: random.Random, vocabulary: Vocabulary, low: int = 2, high: int = 3) -> str:
    return "".join(rng.choice(vocabulary.syllables) for _ in range(rng.randint(low, high)))


def code(rng: random.Random) -> str:
    """A code such as BK4471 or KL-207."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTVWXZ") for _ in range(2))
    return f"{letters}{rng.randint(1000, 9999)}" if rng.random() < 0.5 else f"{letters}-{rng.randint(100, 999)}"


class Fresh:
    """Draws that never repeat within one world: names and informative numbers stay unambiguous."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.used = rng, set()  # type: tuple[random.Random, set[object]]

    def draw(self, make, attempts: int = 200):  # type: ignore[no-untyped-def]
        """The first value of `make()` that is new; after `attempts` a code, which hardly repeats."""
        for _ in range(attempts):
            value = make()
            if value not in self.used:
                self.used.add(value)
                return value
        return self.draw(lambda: code(self.rng))

    def number(self, low: int | None = None, high: int | None = None) -> int | float:
        rng = self.rng
        if low is not None and high is not None:
            return self.draw(lambda: rng.randint(low, high))

        def make() -> int | float:
            kind = rng.random()
            if kind < 0.55:
                return rng.randint(11, 99)
            if kind < 0.85:
                return rng.randint(101, 989)
            return rng.randint(12, 98) + rng.randint(1, 9) / 10

        return self.draw(make)


def _name(rng: random.Random, style: str, vocabulary: Vocabulary, language: Language) -> str:
    if style == "code":
        return code(rng)
    if language == "zh":
        return _invented(rng, vocabulary, 2, 3)
    words = [_invented(rng, vocabulary).capitalize() for _ in range(1 if style == "place" else 2)]
    return " ".join(words)


def _figure(
    phrase: str,
    kind: str,
    unit: str | None,
    fresh: Fresh,
    members: list[str],
    dimension: Dimension | None,
    language: Language,
    per: str | None = None,
) -> Attribute:
    attribute = Attribute(phrase, kind, "number", None, unit, per, dimension)
    keys: list[str] = []
    if dimension is not None and dimension.parameter == "year":
        first = fresh.rng.randint(2001, 2023)
        keys = [str(first), str(first + 1)]
    elif dimension is not None:
        keys = [str(v).lower() if isinstance(v, bool) else str(v) for v in dimension.values(language)]
    for member in members:
        attribute.values[member] = {key: fresh.number() for key in keys} if keys else fresh.number()
    return attribute


def random_world(rng: random.Random, language: Language, vocabulary: Vocabulary) -> World:
    """Two to four types in a chain of relations, two to four entities each, one to three attributes each."""
    fresh = Fresh(rng)
    kinds = rng.sample(vocabulary.kinds, rng.choice((2, 3, 3, 4)))
    types: dict[str, list[str]] = {}
    for kind in kinds:
        style = rng.choice(("person", "place", "code"))
        types[kind] = [
            fresh.draw(lambda style=style: _name(rng, style, vocabulary, language)) for _ in range(rng.randint(2, 4))
        ]
    attributes: dict[str, Attribute] = {}

    def qualifier() -> str:
        return _invented(rng, vocabulary) if rng.random() < vocabulary.invented else rng.choice(vocabulary.qualifiers)

    def phrase(last: str) -> str:
        return fresh.draw(lambda: _join(qualifier(), last, language))

    for kind, target in itertools.pairwise(kinds):
        text = fresh.draw(lambda target=target: _join(rng.choice(vocabulary.links), target, language))
        relation = Attribute(text, kind, "relation", target)
        targets = types[target][:]
        rng.shuffle(targets)
        relation.values = {member: targets[i % len(targets)] for i, member in enumerate(types[kind])}
        attributes[text] = relation
    for index, kind in enumerate(kinds):
        for _ in range(rng.randint(1, 2) + (index == len(kinds) - 1)):
            form = rng.random()
            if form < 0.2:
                label = phrase(rng.choice(vocabulary.labels))
                attributes[label] = Attribute(
                    label, kind, "text", values={m: fresh.draw(lambda: code(rng)) for m in types[kind]}
                )
            elif form < 0.32:
                last, unit, per = rng.choice(vocabulary.rates)
                label = phrase(last)
                attributes[label] = _figure(label, kind, unit, fresh, types[kind], None, language, per)
            else:
                last, figure_unit = rng.choice(vocabulary.figures)
                label = phrase(last)
                dimension = rng.choice(DIMENSIONS) if rng.random() < 0.2 else None
                attributes[label] = _figure(label, kind, figure_unit, fresh, types[kind], dimension, language)
    return World(language, _join(kinds[0], kinds[-1], language), types, attributes)


def random_knowledge(rng: random.Random, language: Language, vocabulary: Vocabulary | None = None) -> KnowledgeRow:
    """A knowledge row about a made-up world."""
    world = random_world(rng, language, vocabulary or default_vocabulary(language))
    return KnowledgeRow(domain=world.domain, text=write_text(world, rng), language=language)
