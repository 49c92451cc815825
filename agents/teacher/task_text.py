"""The teacher's task language: a plan of calls written as a user's request, and read back from it.

A step is a phrase for a tool (from its description; never its name) and, for each argument, the argument's words and the
value as a JSON literal, or the words that say it comes from an earlier step. `render` writes, `parse` reads with the
same phrases and the same tool documents; what stands between the steps (greetings, context, constraints) is free text.
So the policy's program can recover a plan from the question and the tools alone, as a model would, with no side channel.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agents.tool_docs import names_tool, properties, words
from astrolabe.records.equality import has_chinese
from astrolabe.records.messages import FunctionSchema

Language = Literal["en", "zh"]
_DECODER = json.JSONDecoder()

_THIRD_PERSON = re.compile(
    r"^(gets|returns|fetches|lists|creates|adds|sends|deletes|removes|retrieves|searches|reads|writes|updates|edits|"
    r"finds|checks|shows|runs|starts|stops|opens|closes|loads|executes|converts|generates|provides|analyzes|detects|"
    r"calculates|counts|downloads|uploads|sets|cancels|validates|builds|makes|moves|resizes|clones|inserts|marks)\b"
)

_ZH_WORDS = {
    "get": "获取", "list": "列出", "search": "搜索", "find": "查找", "fetch": "抓取", "create": "创建", "add": "添加",
    "delete": "删除", "remove": "移除", "update": "更新", "edit": "编辑", "set": "设置", "send": "发送", "read": "读取",
    "write": "写入", "check": "检查", "run": "运行", "execute": "执行", "start": "启动", "stop": "停止", "open": "打开",
    "close": "关闭", "convert": "转换", "download": "下载", "upload": "上传", "analyze": "分析", "validate": "校验",
    "show": "展示", "count": "统计", "compare": "比较", "generate": "生成", "move": "移动", "copy": "复制", "load": "加载",
    "save": "保存", "encode": "编码", "decode": "解码", "navigate": "访问", "click": "点击", "take": "截取", "all": "全部",
    "information": "信息", "info": "信息", "details": "详情", "detail": "详情", "data": "数据", "file": "文件", "files": "文件",
    "directory": "目录", "document": "文档", "text": "文本", "image": "图片", "images": "图片", "picture": "图片",
    "message": "消息", "messages": "消息", "channel": "频道", "channels": "频道", "user": "用户", "group": "群组",
    "server": "服务器", "status": "状态", "price": "价格", "crypto": "加密货币", "market": "市场", "token": "代币",
    "tokens": "代币", "block": "区块", "transaction": "交易", "transactions": "交易", "account": "账户", "balance": "余额",
    "wallet": "钱包", "address": "地址", "news": "新闻", "time": "时间", "date": "日期", "week": "周", "year": "年份",
    "weather": "天气", "location": "位置", "city": "城市", "country": "国家", "map": "地图", "game": "游戏", "level": "关卡",
    "player": "玩家", "match": "比赛", "history": "历史记录", "team": "队伍", "champion": "英雄", "statistics": "统计数据",
    "stats": "统计数据", "package": "软件包", "packages": "软件包", "version": "版本", "versions": "版本",
    "component": "组件", "components": "组件", "project": "项目", "projects": "项目", "workspace": "工作区",
    "repository": "仓库", "repo": "仓库", "branch": "分支", "commit": "提交", "tag": "标签", "git": "Git", "page": "网页",
    "web": "网页", "browser": "浏览器", "tab": "标签页", "tabs": "标签页", "screenshot": "屏幕截图", "element": "元素",
    "session": "会话", "node": "节点", "nodes": "节点", "task": "任务", "tasks": "任务", "workflow": "工作流",
    "template": "模板", "templates": "模板", "prompt": "提示词", "test": "测试", "code": "代码", "script": "脚本",
    "command": "命令", "terminal": "终端", "audio": "音频", "video": "视频", "latest": "最新的",
    "historical": "历史", "current": "当前的", "by": "按", "id": "编号", "name": "名称", "names": "名称", "table": "表格",
    "paragraph": "段落", "format": "格式", "color": "颜色", "note": "笔记", "notes": "笔记", "email": "邮件", "mail": "邮件",
    "calendar": "日历", "event": "事件", "events": "事件", "memory": "记忆", "entity": "实体", "entities": "实体",
    "campaign": "广告活动", "campaigns": "广告活动", "ad": "广告", "ads": "广告", "chart": "图表", "dashboard": "仪表盘",
    "dataset": "数据集", "datasets": "数据集", "scan": "扫描", "agent": "智能体", "agents": "智能体", "card": "卡牌",
    "cards": "卡牌", "character": "角色", "exchange": "兑换", "rates": "汇率", "currency": "货币", "content": "内容",
    "and": "和", "from": "来自", "to": "到", "with": "带", "for": "用于", "of": "的", "in": "在",
}  # fmt: skip


@dataclass(frozen=True)
class Flow:
    """An argument that comes from the result of an earlier step (0 for the first)."""

    step: int


@dataclass
class Step:
    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """name -> JSON value, or `Flow`."""


def _by_name(tool: FunctionSchema, language: Language) -> str:
    parts = words(tool.name)
    if language == "en":
        return " ".join(parts)
    out = ""
    for part in parts:
        word = _ZH_WORDS.get(part, part)
        out += word if not out or has_chinese(word) or has_chinese(out[-1]) else " " + word
    return out


def _by_description(tool: FunctionSchema, names: Sequence[str]) -> str:
    """The first sentence of the description as a request; empty if it is unusable (names a tool, too long, not a verb)."""
    lines = [line.strip() for line in tool.description.strip().splitlines() if line.strip()]
    first = re.split(r"(?<=[^.])[.:;!?。：；](?:\s|$)|\s[(（\[]", lines[0] if lines else "")[0].strip().rstrip(".。,，")
    first = re.sub(r"^\[[^\]]*\]\s*", "", first)
    first = re.sub(r"^(?:This tool|A tool)(?: that| to| which)? ", "", first)
    if has_chinese(first):
        return first if len(first) <= 40 and not names_tool(first, names) and not re.search(r"[\"`，,]", first) else ""
    if not 8 <= len(first) <= 90 or names_tool(first, names) or re.search(r"[\"`{}<>|*\n]|http", first):
        return ""
    first = first[0].lower() + first[1:] if not first[:2].isupper() else first
    verb = _THIRD_PERSON.match(first)
    if verb:
        word = verb.group(1)
        bare = (
            word[:-3] + "y"
            if word.endswith("ies")
            else word[:-2]
            if word.endswith(("ches", "shes", "xes"))
            else word[:-1]
        )
        first = bare + first[len(word) :]
    return first


def phrases(tools: Sequence[FunctionSchema], language: Language) -> dict[str, str]:
    """tool -> its phrase, all different and none inside another's tail; a tool that gets none is left out."""
    names = [tool.name for tool in tools]
    found: dict[str, str] = {}
    taken: set[str] = set()
    for tool in tools:
        described = _by_description(tool, names)
        if language == "zh" and not has_chinese(described):
            described = ""
        for candidate in (described, _by_name(tool, language)):
            # A single word is no request, and a text equal to a tool's name would name it.
            if not candidate or candidate.lower() in taken or candidate in names:
                continue
            if len(candidate.split()) < 2 and not has_chinese(candidate):
                candidate = f"do the {candidate} check" if language == "en" else f"执行 {candidate} 操作"
                if candidate.lower() in taken:
                    continue
            found[tool.name] = candidate
            taken.add(candidate.lower())
            break
    return found


def labels(tool: FunctionSchema) -> dict[str, str]:
    """argument -> its words; the raw name where two arguments have the same words."""
    found: dict[str, str] = {}
    for name in properties(tool):
        label = " ".join(words(name)) or name
        found[name] = label if label not in found.values() else name
    return found


def literal(value: Any) -> str:
    """A value as it stands in a question."""
    return json.dumps(value, ensure_ascii=False)


def render_step(step: Step, tool: FunctionSchema, phrase: str, language: Language) -> str:
    """One step: the phrase, then its arguments."""
    named = labels(tool)
    parts = []
    for argument, value in step.arguments.items():
        label = named[argument]
        if isinstance(value, Flow):
            source = f"the {label} from the result of step {value.step + 1}"
            parts.append(source if language == "en" else f"{label} 取自第 {value.step + 1} 步的结果")
        else:
            parts.append(f"{label} {literal(value)}" if language == "en" else f"{label} 为 {literal(value)}")
    if not parts:
        return phrase
    return f"{phrase}, using " + ", ".join(parts) if language == "en" else f"{phrase}（" + "，".join(parts) + "）"


_OPENERS: dict[str, tuple[str, ...]] = {
    "en": ("Please ", "Could you ", "I need you to ", "Can you ", "Help me out: "),
    "zh": ("请帮我", "麻烦你", "我需要你", "帮个忙，"),
}


def render(
    steps: Sequence[Step],
    tools: dict[str, FunctionSchema],
    phrase_of: dict[str, str],
    language: Language,
    rng: random.Random,
    *,
    before: str = "",
    after: str = "",
) -> str:
    """The plan as one request. `before` and `after` are free text around it."""
    texts = [render_step(step, tools[step.tool], phrase_of[step.tool], language) for step in steps]
    opener = rng.choice(_OPENERS[language])
    if language == "en":
        if len(texts) == 1:
            body = f"{opener}{texts[0]}."
        elif rng.random() < 0.5:
            body = f"{opener}do the following. " + " ".join(f"({n}) {t}." for n, t in enumerate(texts, 1))
        else:
            joins = ["first "] + ["then "] * (len(texts) - 2) + ["and finally "]
            body = opener + "; ".join(j + t for j, t in zip(joins, texts, strict=True)) + "."
        return " ".join(part for part in (before, body, after) if part)
    if len(texts) == 1:
        body = f"{opener}{texts[0]}。"
    else:
        body = f"{opener}依次完成：" + "；".join(f"（{n}）{t}" for n, t in enumerate(texts, 1)) + "。"
    return before + body + after


_SEPARATOR = re.compile(r"\s*(?:[,，、;（(]|using\b|with\b|and\b|其中)?\s*(?:using\b|and\b|with\b)?\s*")
_FLOW_EN = re.compile(r"from the result of step (\d+)")
_FLOW_ZH = re.compile(r"取自第 ?(\d+) ?步的结果")


def _parse_arguments(text: str, position: int, tool: FunctionSchema) -> tuple[dict[str, Any], int]:
    """The arguments that stand at `position`, and where they end."""
    named = sorted(labels(tool).items(), key=lambda item: -len(item[1]))
    arguments: dict[str, Any] = {}
    while True:
        gap = _SEPARATOR.match(text, position)
        start = gap.end() if gap else position
        start += 4 if text.startswith("the ", start) else 0
        for argument, label in named:
            if argument in arguments or not text.startswith(label, start):
                continue
            rest = start + len(label)
            rest += len(text[rest:]) - len(text[rest:].lstrip(" "))
            flow = _FLOW_EN.match(text, rest) or _FLOW_ZH.match(text, rest)
            if flow:
                arguments[argument], position = Flow(int(flow.group(1)) - 1), flow.end()
                break
            rest += 1 if text.startswith("为", rest) else 0
            rest += len(text[rest:]) - len(text[rest:].lstrip(" "))
            try:
                arguments[argument], position = _DECODER.raw_decode(text, rest)
            except ValueError:
                continue
            break
        else:
            return arguments, position


def parse(question: str, tools: Sequence[FunctionSchema], language: Language) -> list[Step]:
    """The plan that a question states, in its order; empty if it states none of the tools' phrases."""
    by_phrase = sorted(((p, n) for n, p in phrases(tools, language).items()), key=lambda item: (-len(item[0]), item[1]))
    table = {tool.name: tool for tool in tools}
    steps: list[Step] = []
    position = 0
    while True:
        hits = [(question.find(phrase, position), -len(phrase), phrase, name) for phrase, name in by_phrase]
        hits = [hit for hit in hits if hit[0] >= 0]
        if not hits:
            return steps
        at, _, phrase, name = min(hits)
        arguments, position = _parse_arguments(question, at + len(phrase), table[name])
        steps.append(Step(name, arguments))


def written_here(question: str, tools: Sequence[FunctionSchema], language: Language) -> bool:
    """Whether the question is certainly `render`'s: one of its openers stands right before the first phrase."""
    hits = [question.find(phrase) for phrase in phrases(tools, language).values()]
    first = min((at for at in hits if at >= 0), default=-1)
    starts = ("", "first ", "do the following. (1) ") if language == "en" else ("", "依次完成：（1）")
    return first >= 0 and question[:first].endswith(tuple(o + s for o in _OPENERS[language] for s in starts))
