"""Numbers as people write them: signs, thousands, fractions, percent, powers of ten, units, Chinese numerals.

`parse_quantity` reads a text that is one number and nothing but its unit; `find_quantities` finds the numbers inside a
sentence, leaving out digits that belong to a code such as BK4471. Values are exact fractions, never floats.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_LATEX = (
    (re.compile(r"\\text\s*\{([^{}]*)\}|\\mathrm\s*\{([^{}]*)\}|\\mbox\s*\{([^{}]*)\}"), lambda m: " " + (m[1] or m[2] or m[3] or "")),
    (re.compile(r"\\[dt]frac"), lambda m: r"\frac"),
    (re.compile(r"\\(?:left|right|,|!|;|:|quad|displaystyle)"), lambda m: ""),
    (re.compile(r"\{,\}"), lambda m: ","),
    (re.compile(r"\\%"), lambda m: "%"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), lambda m: "°"),
    (re.compile(r"\\(?:times|cdot)"), lambda m: "×"),
    (re.compile(r"\\[$¥€£]|\$"), lambda m: ""),
    (re.compile(r"\\ |~"), lambda m: " "),
)  # fmt: skip


def plain(text: str) -> str:
    """`text` with full-width forms narrowed and the LaTeX that only decorates a number removed."""
    text = re.sub("([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+)", lambda m: "^{" + m[1].translate(_SUPERSCRIPTS) + "}", text.replace("\\$", "$"))
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return re.sub(r"[−–—﹣](?=\s*[\d.\\])", "-", text)


@dataclass(frozen=True)
class Quantity:
    """A number with the unit that was written after (or, for a currency, before) it. `percent`: written as a percentage;
    `value` is then the number before the sign."""

    value: Fraction
    unit: str = ""
    percent: bool = False


_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}  # fmt: skip
_BASE = (
    r"(?:\\frac\s*\{\s*(?P<fn>[-+]?\d+(?:\.\d+)?)\s*\}\s*\{\s*(?P<fd>\d+(?:\.\d+)?)\s*\}"
    r"|(?P<mixed>\d+)\s+(?P<mn>\d+)\s*[/⁄]\s*(?P<md>\d+)"
    r"|(?P<sn>\d+(?:\.\d+)?)\s*[/⁄]\s*(?P<sd>\d+(?:\.\d+)?)"
    r"|(?P<dec>\d{1,3}(?:[, ]\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s*(?:[eE](?P<e>[-+]?\d{1,4})|[×x*]\s*10\s*\^\s*\{?\s*(?P<p>[-+]?\d{1,4})\s*\}?))?)"
)
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])(?P<sign>[-+]?)\s*(?P<cur>[¥€£₹]|USD|EUR|GBP|CNY|RMB)?\s*(?P<sign2>[-+]?)"
    + _BASE
    + r"\s*(?P<scale>thousand\b|million\b|billion\b|trillion\b|[百千万亿](?![克米瓦分])(?:亿)?)?\s*(?P<pct>%|percent\b|per cent\b|个百分点)?"
    + r"(?![A-Za-z]*\d)"
)
_HAN_DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_HAN_DIGITS |= {c: i + 1 for i, c in enumerate("壹贰叁肆伍陆柒捌玖")}
_HAN_UNITS = {"十": 10, "拾": 10, "百": 100, "佰": 100, "千": 1000, "仟": 1000}
_HAN_CHARS = "".join(_HAN_DIGITS) + "".join(_HAN_UNITS) + "万亿"
_HAN = re.compile(rf"(?P<pct>百分之)?(?P<neg>负)?(?P<whole>[\d.]*[{_HAN_CHARS}][\d.{_HAN_CHARS}]*)(?:点(?P<frac>[{''.join(_HAN_DIGITS)}]+))?")  # fmt: skip
_HAN_WORDS = re.compile(r"一共|一下|一样|一起|一定|一些|一直|一般|一致|十分|万一|第[一二三四五六七八九十]|统一|唯一|之一|千万别|百分比")  # fmt: skip


def parse_han(text: str) -> Fraction | None:
    """The value of a Chinese numeral such as 三千零五, 3亿5千万 or 二〇二四; None if it is not one."""
    if all(c in _HAN_DIGITS for c in text):
        return Fraction(int("".join(str(_HAN_DIGITS[c]) for c in text)))
    total = section = Fraction(0)
    digit: Fraction | None = None
    for token in re.findall(rf"\d+(?:\.\d+)?|[{_HAN_CHARS}]", text):
        if token[0].isdigit():
            digit = Fraction(token)
        elif token in _HAN_DIGITS:
            digit = Fraction(_HAN_DIGITS[token])
        elif token in _HAN_UNITS:
            section += (digit if digit is not None else Fraction(1)) * _HAN_UNITS[token]
            digit = None
        else:
            section += digit or 0
            if not section and not total:
                return None
            scale = 10**4 if token == "万" else 10**8
            # 亿 multiplies all that came before it (三万亿), 万 only its own section (三亿五千万)
            total = (total + section) * scale if token == "亿" else total + section * scale
            section, digit = Fraction(0), None
    return total + section + (digit or 0)


_UNITS = {
    # unit: (dimension, factor)
    "mm": ("length", Fraction(1, 1000)), "cm": ("length", Fraction(1, 100)), "m": ("length", Fraction(1)), "km": ("length", Fraction(1000)),
    "mg": ("mass", Fraction(1, 1000)), "g": ("mass", Fraction(1)), "kg": ("mass", Fraction(1000)), "t": ("mass", Fraction(10**6)),
    "ml": ("volume", Fraction(1, 1000)), "l": ("volume", Fraction(1)),
    "s": ("time", Fraction(1)), "min": ("time", Fraction(60)), "h": ("time", Fraction(3600)), "day": ("time", Fraction(86400)),
    "usd": ("usd", Fraction(1)), "eur": ("eur", Fraction(1)), "gbp": ("gbp", Fraction(1)), "cny": ("cny", Fraction(1)),
    "°c": ("celsius", Fraction(1)), "°f": ("fahrenheit", Fraction(1)),
}  # fmt: skip
_UNIT_NAMES = {
    "millimeter": "mm", "millimetre": "mm", "毫米": "mm", "centimeter": "cm", "centimetre": "cm", "厘米": "cm", "meter": "m", "metre": "m", "米": "m",
    "kilometer": "km", "kilometre": "km", "公里": "km", "千米": "km", "milligram": "mg", "毫克": "mg", "gram": "g", "克": "g", "kilogram": "kg", "kilo": "kg",
    "公斤": "kg", "千克": "kg", "tonne": "t", "吨": "t", "milliliter": "ml", "millilitre": "ml", "毫升": "ml", "liter": "l", "litre": "l", "升": "l",
    "sec": "s", "second": "s", "秒": "s", "minute": "min", "mins": "min", "分钟": "min", "hour": "h", "hr": "h", "小时": "h", "days": "day", "天": "day",
    "dollar": "usd", "美元": "usd", "euro": "eur", "欧元": "eur", "€": "eur", "pound": "gbp", "£": "gbp", "英镑": "gbp", "元": "cny", "¥": "cny", "rmb": "cny",
    "人民币": "cny", "yuan": "cny", "℃": "°c", "摄氏度": "°c", "degrees celsius": "°c", "华氏度": "°f", "degrees fahrenheit": "°f",
}  # fmt: skip


def _unit(text: str) -> str:
    unit = text.strip(" .。,，;；!！").casefold()
    for name in (unit, unit.removesuffix("s")):
        if name in _UNIT_NAMES:
            return _UNIT_NAMES[name]
        if name in _UNITS:
            return name
    return unit


def _from_match(match: re.Match[str]) -> Quantity | None:
    groups = match.groupdict()
    try:
        if groups["fn"] is not None:
            value = Fraction(groups["fn"]) / Fraction(groups["fd"])
        elif groups["mixed"] is not None:
            value = int(groups["mixed"]) + Fraction(int(groups["mn"]), int(groups["md"]))
        elif groups["sn"] is not None:
            value = Fraction(groups["sn"]) / Fraction(groups["sd"])
        else:
            value = Fraction(re.sub("[, ]", "", groups["dec"]))
            exponent = int(groups["e"] or groups["p"] or 0)
            if abs(exponent) > 400:  # no answer is meant to be this large, and the exact power would be costly
                return None
            value *= Fraction(10) ** exponent
    except ZeroDivisionError:
        return None
    for scale in (groups["scale"] or "") if (groups["scale"] or "")[:1] in "百千万亿" else [groups["scale"]]:
        value *= _SCALES.get(scale or "", 1)
    if "-" in (groups["sign"] + groups["sign2"]):
        value = -value
    return Quantity(value, _unit(groups["cur"] or ""), bool(groups["pct"]))


def _han_from_match(match: re.Match[str]) -> Quantity | None:
    value = parse_han(match["whole"])
    if value is None:
        return None
    if match["frac"]:
        digits = "".join(str(_HAN_DIGITS[c]) for c in match["frac"])
        value += Fraction(int(digits), 10 ** len(digits))
    return Quantity(-value if match["neg"] else value, "", bool(match["pct"]))


def parse_quantity(text: str) -> Quantity | None:
    """The one number that `text` is, with its unit; None if it is something else, or more than that."""
    body = plain(text).strip().strip("=≈ ").strip()
    body = re.sub(r"^(about|approximately|约|大约|共|一共)\s*", "", body, flags=re.IGNORECASE)
    body = body.rstrip(".。!！")
    if re.search(rf"[{_HAN_CHARS}]", body):
        match = _HAN.match(body)
        if match and match["whole"]:
            rest = body[match.end() :]
            if len(rest) <= 12 and not re.search(r"[\d+\-*/=<>]", rest):
                quantity = _han_from_match(match)
                if quantity is not None:
                    return Quantity(quantity.value, _unit(rest) or quantity.unit, quantity.percent)
    percent = body.startswith("百分之")
    match = _NUMBER.match(body.removeprefix("百分之"))
    if not match or match.start() != 0:
        return None
    rest = body.removeprefix("百分之")[match.end() :]
    if len(rest) > 24 or re.search(r"[\d+\-*=<>\\^]", re.sub(r"\^?\{?[23]\}?$", "", rest)) or len(rest.split()) > 3:
        return None
    if re.fullmatch(r"\s*[([{].*|.*[,;，；、].*", rest):
        return None
    quantity = _from_match(match)
    if quantity is None:
        return None
    return Quantity(quantity.value, _unit(rest) or quantity.unit, quantity.percent or percent)


def find_quantities(text: str) -> list[tuple[int, int, Quantity]]:
    """(start, end, quantity) of the numbers inside `plain(text)`, in order. Chinese numerals count only where no digits
    stand, since 一 and 十 are parts of many words."""
    body = plain(text)
    found = []
    for match in _NUMBER.finditer(body):
        quantity = _from_match(match)
        if quantity is not None:
            unit = re.match(r"\s*([^\W\d_]{1,12}|°[CF])", body[match.end() :])
            name = _unit(unit[1]) if unit and _unit(unit[1]) in _UNITS else quantity.unit
            found.append((match.start("sign"), match.end(), Quantity(quantity.value, name, quantity.percent)))
    if not found:
        masked = _HAN_WORDS.sub(lambda m: " " * len(m[0]), body)
        for match in _HAN.finditer(masked):
            quantity = _han_from_match(match)
            if quantity is not None:
                found.append((match.start(), match.end(), quantity))
    return found


def _decimals(value: Fraction) -> int | None:
    """Digits after the point of a terminating decimal; None for one that does not end."""
    for digits in range(16):
        if (value * 10**digits).denominator == 1:
            return digits
    return None


def same_value(a: Fraction, b: Fraction) -> bool:
    """Equal to 1e-6 relative (1e-9 for a whole gold), or one is a decimal of at least three places that the other, a fraction that does not
    end, rounds to."""
    if abs(a - b) <= abs(b) / (10**9 if b.denominator == 1 else 10**6):
        return True
    for exact, rounded in ((a, b), (b, a)):
        digits = _decimals(rounded)
        if _decimals(exact) is None and digits is not None and digits >= 3:
            return abs(exact - rounded) * 2 * 10**digits <= 1
    return False


def same_quantity(predicted: Quantity, gold: Quantity) -> bool:
    """Equal values in units that agree: a missing unit agrees with any, metres convert to kilometres, and a percentage
    agrees with the number written before the sign or with its hundredth."""
    mine, theirs = _UNITS.get(predicted.unit), _UNITS.get(gold.unit)
    value = predicted.value
    if mine and theirs:
        if mine[0] != theirs[0]:
            return False
        value = value * mine[1] / theirs[1]
    if same_value(value, gold.value):
        return True
    if predicted.percent and not gold.percent:
        return same_value(value / 100, gold.value)
    if gold.percent and not predicted.percent:
        return same_value(value * 100, gold.value)
    return False
