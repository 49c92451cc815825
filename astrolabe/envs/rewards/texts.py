"""Answers in words: spans, choices, dates, yes and no. English and Chinese; accents, case and width do not count."""

from __future__ import annotations

import datetime as dt
import re
import unicodedata
from collections import Counter

_TOKEN = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?|[\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3400-\u9fff\uf900-\ufaff]+|\d+")  # fmt: skip
_ARTICLES = {"a", "an", "the"}
_DETERMINATE = {"yes", "no", "noanswer"}


def normal_tokens(text: str) -> list[str]:
    """Tokens for comparison: NFKC, accents folded, case folded, punctuation and articles dropped (a lone article is kept:
    it is a choice), numbers whole with their sign, Chinese by character."""
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).replace("−", "-"))
    text = "".join(c for c in text if not unicodedata.combining(c)).casefold()
    text = re.sub(r"(?<=\w)['’](?=\w)", "", text)
    tokens = [t.replace(",", "").lstrip("+") if t[-1].isdigit() else t for t in _TOKEN.findall(text)]
    kept = [t for t in tokens if t not in _ARTICLES]
    return kept or tokens


def token_f1(predicted: str, gold: str) -> float:
    """Token F1 in [0, 1]; a yes or no that differs from the gold is 0 whatever else overlaps."""
    mine, theirs = normal_tokens(predicted), normal_tokens(gold)
    joined = "".join(mine), "".join(theirs)
    if joined[0] != joined[1] and (joined[0] in _DETERMINATE or joined[1] in _DETERMINATE):
        return 0.0
    same = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * same / (len(mine) + len(theirs)) if same else 0.0


_ALTERNATIVES = re.compile(r"\s(?:or|and/or|versus|vs\.?)\s|或者|或是|或|还是|\s[/|]\s|[;；|]", re.IGNORECASE)


def offers_several(text: str, gold: str) -> bool:
    """Whether `text` hedges over several candidates where the gold does not: alternatives by `or`, or a list of three
    and more of which one is the gold."""
    if _ALTERNATIVES.search(f" {text} ") and not _ALTERNATIVES.search(f" {gold} "):
        return True
    items = [item for item in re.split(r"[,，、\n]|\sand\s", text) if item.strip()]
    if len(items) >= 3 and len(re.split(r"[,，、\n]|\sand\s", gold)) < len(items):
        return any(normal_tokens(item) == normal_tokens(gold) for item in items)
    return False


_COPULA = re.compile(r"\s(?:is|are|was|were|equals|be|named|called)\s|[:：=]|应该是|是|为|叫做?|等于", re.IGNORECASE)
_DENIES = re.compile(r"\b(?:not|isn'?t|wasn'?t|never|neither|nor)\b|不是|并非|没有", re.IGNORECASE)


def span_readings(sentence: str) -> list[str]:
    """What a sentence may put forward as its answer: all of it, what follows its last copula, what precedes its first.
    A sentence that denies something is only read whole."""
    readings = [sentence]
    if not _DENIES.search(sentence):
        cuts = list(_COPULA.finditer(sentence))
        if cuts:
            readings += [sentence[cuts[-1].end() :], sentence[: cuts[0].start()]]
    return [r.strip() for r in readings if r.strip()]


def read_choice(text: str) -> str | None:
    """The option letters that a text chooses, sorted and joined (`AC`); None if it names none."""
    body = unicodedata.normalize("NFKC", text).strip().strip("$*").strip()
    body = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", body)
    match = re.fullmatch(r"[(\[]?([A-Za-z])[)\]]?(?:[.:、].*|\s*[)\]].*)?", body, re.DOTALL)
    if match:
        return match[1].upper()
    match = re.fullmatch(r"(?:[(\[]?[A-Z][)\]]?(?:\s*(?:[,;、]|and|和)\s*|\s*))+\.?", body)
    if match:
        return "".join(sorted(set(re.findall(r"[A-Z]", re.sub(r"and", "", body)))))
    found = re.findall(
        r"(?:answer|option|choice|choose|select|pick|答案|选项?|选择)(?:\s+(?:is|was))?[是为:]?\s*[(\[]?([A-Z])(?![A-Za-z])", body, re.IGNORECASE
    ) or re.findall(r"(?<![A-Za-z])[(\[]([A-Z])[)\]]|(?:\bis|是|为)\s*([A-Z])\s*[.。]?$", body)  # fmt: skip
    letters = {("".join(f)).upper() for f in found}
    return letters.pop() if len(letters) == 1 else None


_MONTHS = {
    m: i for i, m in enumerate(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1)
}
_MONTH = r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"  # fmt: skip
_HAN_DIGIT = {c: str(i) for i, c in enumerate("〇一二三四五六七八九")} | {"零": "0"}
_DATES = (
    (re.compile(r"(?<!\d)(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?!\d)"), "ymd"),
    (re.compile(r"(\d{4})\s*年\s*(\d{1,2})\s*月\s*(\d{1,2})\s*[日号]?"), "ymd"),
    (re.compile(rf"\b{_MONTH}\s+(\d{{1,2}})(?:st|nd|rd|th)?\s*,?\s*(\d{{4}})", re.IGNORECASE), "Mdy"),
    (re.compile(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}\s*,?\s*(\d{{4}})", re.IGNORECASE), "dMy"),
    (re.compile(r"(?<!\d)(\d{1,2})[/.](\d{1,2})[/.](\d{4})(?!\d)"), "mdy"),
    (re.compile(r"(\d{4})\s*年\s*(\d{1,2})\s*月"), "ym"),
    (re.compile(rf"\b{_MONTH}\s*,?\s+(\d{{4}})", re.IGNORECASE), "My"),
    (re.compile(r"(?<!\d)(\d{4})[-/](\d{1,2})(?![\d])"), "ym"),
    (re.compile(r"(?<!\d)(\d{1,2})\s*月\s*(\d{1,2})\s*[日号]"), "md"),
    (re.compile(rf"\b{_MONTH}\s+(\d{{1,2}})(?:st|nd|rd|th)?\b", re.IGNORECASE), "Md"),
    (re.compile(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}", re.IGNORECASE), "dM"),
    (re.compile(r"(?<![\d.])(\d{4})\s*年?(?![\d.])"), "y"),
)
Date = tuple[int | None, int | None, int | None]


def read_dates(text: str) -> list[Date]:
    """(year, month, day) of the dates in a text, parts that are not named being None. 03/05/2024 is read month first,
    unless that is no date."""
    body = unicodedata.normalize("NFKC", text)
    body = re.sub(r"[〇零一二三四五六七八九]{4}(?=年)", lambda m: "".join(_HAN_DIGIT[c] for c in m[0]), body)
    body = re.sub(r"([一二三四五六七八九]?十[一二三四五六七八九]?|[一二三四五六七八九])(?=[月日号])", _han_small, body)
    taken: list[tuple[int, int]] = []
    found: list[tuple[int, Date]] = []
    for pattern, form in _DATES:
        for match in pattern.finditer(body):
            if any(match.start() < end and start < match.end() for start, end in taken):
                continue
            taken.append(match.span())
            parts = dict(zip(form, match.groups(), strict=True))
            year = int(parts["y"]) if "y" in parts else None
            month = int(parts["m"]) if "m" in parts else _MONTHS[parts["M"][:3].lower()] if "M" in parts else None
            day = int(parts["d"]) if "d" in parts else None
            if form == "mdy" and month is not None and month > 12:
                month, day = day, month
            try:
                dt.date(year or 2000, month or 1, day or 1)
            except ValueError:
                continue
            found.append((match.start(), (year, month, day)))
    return [date for _, date in sorted(found, key=lambda item: item[0])]


def _han_small(match: re.Match[str]) -> str:
    text = match[1]
    if "十" not in text:
        return _HAN_DIGIT[text]
    tens, ones = text.split("十")
    return str((int(_HAN_DIGIT[tens]) if tens else 1) * 10 + (int(_HAN_DIGIT[ones]) if ones else 0))


def same_date(predicted: Date, gold: Date) -> bool:
    """All that the gold names agrees; a prediction may be more exact, not less."""
    return all(g is None or p == g for p, g in zip(predicted, gold, strict=True))


_YES = re.compile(
    r"^(?:yes|true|correct|right|y)\b|^(?:是的?|对的?|正确|真|有的?|可以|能)(?:$|[,，。.！!;；\s])", re.IGNORECASE
)
_NO = re.compile(r"^(?:no|false|incorrect|wrong|n)\b|^(?:不是|否|不对|错误?|假|没有|不可以|不能|不)", re.IGNORECASE)
_ANY_YES = re.compile(r"\b(?:yes|true)\b|是的|正确", re.IGNORECASE)
_ANY_NO = re.compile(r"\b(?:no|false|not)\b|不是|不正确|错误|否", re.IGNORECASE)


def read_boolean(text: str) -> bool | None:
    """True or False as a text says it, by how it begins or by the only such word in it; None if it says neither or
    both."""
    body = unicodedata.normalize("NFKC", text).strip().strip("*\"'$").strip()
    body = re.sub(r"\\text\{([^{}]*)\}", r"\1", body)
    if re.search(
        r"\b(?:yes|true)\b.{0,6}\bor\b.{0,6}\b(?:no|false)\b|是或(?:者)?(?:不是|否)|是或否", body, re.IGNORECASE
    ):
        return None
    if _NO.match(body):
        return False
    if _YES.match(body):
        return True
    yes, no = bool(_ANY_YES.search(body)), bool(_ANY_NO.search(body))
    return yes if yes != no else None
