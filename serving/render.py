"""Between messages and ids: the prompt once, then only suffixes, so that the ids that were sampled are never changed.

`prompt_ids` renders a conversation, `parse` reads a sampled turn, and `bridge` gives the ids that follow it: the
template's glue and the new messages, appended. Templates come from the package `renderers` (Qwen3, Llama 3); ours is
what makes them safe: content is fenced (`serving/tokenizer.py`), so no message can become a turn, and a bridge that
would change what came before is a `BridgeError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from astrolabe.records.errors import UsageError
from astrolabe.records.jsonl import read_object
from astrolabe.records.messages import FunctionCall, Message, ToolCall, ToolSchema
from serving.parsing import ParsedCall, ParsedTurn, TagIds, parse_llama3, parse_tagged
from serving.tokenizer import TextTokenizer

__all__ = ["BridgeError", "BridgeResult", "ParsedCall", "ParsedTurn", "Renderer", "check_template", "content_text"]

MessageLike = Message | Mapping[str, Any]
ToolLike = ToolSchema | Mapping[str, Any]
Author = Literal["template", "tool", "prompt"]
_FAMILIES = {"qwen3": "qwen3", "llama": "llama3", "llama3": "llama3"}
_NEEDED = {
    "qwen3": [
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    ],
    "llama3": [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
    ],
}


class BridgeError(Exception):
    """The template cannot continue this turn by appending; the caller forks, or ends the episode."""


@dataclass(frozen=True)
class BridgeResult:
    ids: list[int]
    """What follows the sampled ids, up to and with the next generation prompt. None of it was sampled."""
    segments: list[tuple[Author, int]]
    """Runs of `ids` by author: `tool` for a tool's text, `prompt` for a user's or system's, else `template`."""


class Renderer:
    """One model family's template over one tokenizer. Cheap per call; texts that come again are encoded once.

    With thinking off (the default) a message's reasoning is not rendered: no prompt of that policy has any.
    """

    def __init__(self, tokenizer: TextTokenizer, family: str, *, enable_thinking: bool = False) -> None:
        if family not in _FAMILIES:
            raise UsageError(f"no renderer for the model family {family!r}", f"one of {', '.join(sorted(_FAMILIES))}")
        self.family = _FAMILIES[family]
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking and self.family == "qwen3"
        self._inner: Any = _inner_renderer(tokenizer, self.family, self.enable_thinking)
        self.stop_ids: tuple[int, ...] = tuple(self._inner.get_stop_token_ids())
        self._stops = frozenset(self.stop_ids)
        self._turn_start = tokenizer.added["<|im_start|>" if self.family == "qwen3" else "<|start_header_id|>"]
        added = tokenizer.added.get
        if self.family == "qwen3":
            self._tags = TagIds(
                added("<think>"), added("</think>"), tokenizer.added["<tool_call>"], tokenizer.added["</tool_call>"]
            )
        self._python_tag = added("<|python_tag|>")
        self._probe_ids = self.prompt_ids([{"role": "user", "content": "x"}], None)

    @classmethod
    def from_folder(cls, path: Path | str, *, enable_thinking: bool = False) -> Renderer:
        """From a Hugging Face folder: `tokenizer.json`, and the family by `model_type` in `config.json`."""
        config = Path(path) / "config.json"
        if not config.is_file():
            raise UsageError(f"no config.json in {path}", "give a Hugging Face model folder")
        row = read_object(config, "take the config.json that came with the model")
        return cls(TextTokenizer.from_folder(path), row.get("model_type", ""), enable_thinking=enable_thinking)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of template text: added tokens are recognised."""
        return self.tokenizer.encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of content: no added token is recognised."""
        return self.tokenizer.encode_plain(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def prompt_ids(self, messages: Sequence[MessageLike], tools: Sequence[ToolLike] | None) -> list[int]:
        """The conversation with the generation prompt. UsageError where the template cannot say it."""
        return self._render(messages, tools, generate=True)

    def conversation_ids(self, messages: Sequence[MessageLike], tools: Sequence[ToolLike] | None) -> list[int]:
        """The whole conversation, without a generation prompt. For comparison: training rows are built by bridging."""
        return self._render(messages, tools, generate=False)

    def completion_ids(self, message: MessageLike) -> list[int]:
        """An assistant turn as the policy would sample it: what follows the generation prompt, to the stop token."""
        turn = _as_dict(message)
        if turn.get("role") != "assistant":
            raise UsageError(f"a completion is an assistant's, not a {turn.get('role')}'s", "give an assistant message")
        whole = self._render([{"role": "user", "content": "x"}, turn], None, generate=False)
        start = len(self._probe_ids)
        if whole[:start] != self._probe_ids:
            raise BridgeError(
                "the template renders this turn otherwise than after its own generation prompt"
                + (": with thinking on, a turn needs its reasoning" if self.enable_thinking else "")
            )
        end = max(i for i, token in enumerate(whole) if token in self._stops)
        return whole[start : end + 1]

    def parse(self, output_ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedTurn:
        """Read a sampled turn. `prompt_ids` tell whether the prompt had opened the reasoning."""
        if self.family == "llama3":
            return parse_llama3(self.tokenizer, output_ids, self._stops, self._python_tag)
        open_think = False
        for token in reversed(self._tail(prompt_ids)):
            if token in (self._tags.think, self._tags.think_end):
                open_think = token == self._tags.think
                break
        return parse_tagged(self.tokenizer, output_ids, self._stops, self._tags, in_reasoning=open_think)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        new_messages: Sequence[MessageLike],
        tools: Sequence[ToolLike] | None = None,
    ) -> BridgeResult:
        """The ids between a sampled turn and the next generation prompt.

        `prompt_ids + output_ids + ids` is the next prompt. A turn that was cut gets the template's end token, which
        was not sampled. BridgeError where the template cannot append `new_messages`.
        """
        if not new_messages:
            raise BridgeError("no new message follows the turn")
        messages = [self._fenced(_as_dict(message)) for message in new_messages]
        stop_at = next((i for i, token in enumerate(output_ids) if token in self._stops), None)
        if stop_at is not None and stop_at != len(output_ids) - 1:
            raise BridgeError(f"ids follow the stop token, at {stop_at} of {len(output_ids)}")
        head = [*self._tail(prompt_ids), *output_ids]
        rendered = self._inner.bridge_to_next_turn(
            self._tail(prompt_ids), list(output_ids), messages, tools=self._tools(tools)
        )
        if rendered is None:
            roles = ", ".join(str(message.get("role")) for message in messages)
            open_think = (stop_at is not None and "the turn ended inside its reasoning, or ") or ""
            raise BridgeError(f"{open_think}the template cannot append messages of {roles}")
        if rendered.token_ids[: len(head)] != head:
            raise BridgeError("the template changes what came before")
        ids = rendered.token_ids[len(head) :]
        authors: list[Author] = []
        for index, body in zip(rendered.message_indices[len(head) :], rendered.is_content[len(head) :], strict=True):
            role = messages[index].get("role") if body and index >= 0 else None
            authors.append("template" if role is None else "tool" if role == "tool" else "prompt")
        return BridgeResult(list(ids), _runs(authors))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt from its last turn's start: all that decides how it goes on."""
        for index in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[index] == self._turn_start:
                return list(prompt_ids[index:])
        return list(prompt_ids)

    def _render(
        self, messages: Sequence[MessageLike], tools: Sequence[ToolLike] | None, *, generate: bool
    ) -> list[int]:
        fenced = [self._fenced(_as_dict(message)) for message in messages]
        try:
            return self._inner.render(fenced, tools=self._tools(tools), add_generation_prompt=generate).token_ids
        except (ValueError, TypeError) as error:
            raise UsageError(f"the {self.family} template cannot render this conversation: {error}", "") from None

    def _tools(self, tools: Sequence[ToolLike] | None) -> list[Any] | None:
        if not tools:
            return None
        return [
            self.tokenizer.guard(tool.model_dump(mode="json") if isinstance(tool, BaseModel) else dict(tool))
            for tool in tools
        ]

    def _fenced(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template takes it: every text a string, fenced; stripped where the template strips."""
        fence, role = self.tokenizer.fence, message.get("role")
        text = content_text(message.get("content"), role=str(role))
        if self.family == "llama3" and role != "tool":
            text = text.strip()
        if role != "assistant":
            return {"role": role, "content": fence(text), "name": message.get("name")}
        reasoning = (message.get("reasoning_content") or "").strip("\n") if self.enable_thinking else ""
        calls = [
            {
                "function": {
                    "name": fence(function.get("name") or ""),
                    "arguments": fence(_arguments_text(function.get("arguments"))),
                }
            }
            for function in (call.get("function") or call for call in message.get("tool_calls") or [])
        ]
        # A string, even empty, keeps the template from looking for `</think>` in the content.
        return {
            "role": role,
            "content": fence(text.lstrip("\n")),
            "reasoning_content": fence(reasoning),
            "tool_calls": calls,
        }


def content_text(content: Any, *, role: str) -> str:
    """A message's content as text: a string as it is, OpenAI's list of text parts joined, anything else as JSON.

    None is the empty string, except from a tool, where it is a value (`null`).
    """
    if isinstance(content, str):
        return content
    if content is None and role != "tool":
        return ""
    if isinstance(content, list) and content and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    return json.dumps(content, ensure_ascii=False)


DEFAULT_CHECK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I add.",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "4"},
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "Four."},
]
DEFAULT_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


def check_template(
    renderer: Renderer, messages: Sequence[MessageLike] | None = None, tools: Sequence[ToolLike] | None = None
) -> int:
    """Prove that appending equals rendering for a clean conversation; the number of assistant turns checked.

    BridgeError names the first assistant turn (from 0) whose prompt, built by appending, is not what the template
    renders. Call it when a policy is set up: a template that drops or adds something later fails here, loudly.
    """
    if messages is None:
        tools = DEFAULT_TOOLS
        messages = DEFAULT_CHECK if renderer.enable_thinking else [_without_reasoning(m) for m in DEFAULT_CHECK]
    rows = [_as_dict(message) for message in messages]
    turns = [i for i, row in enumerate(rows) if row.get("role") == "assistant"]
    if not turns:
        raise BridgeError("the conversation has no assistant turn")
    prompt = renderer.prompt_ids(rows[: turns[0]], tools)
    for turn, at in enumerate(turns):
        try:
            output = renderer.completion_ids(rows[at])
            whole = renderer.conversation_ids(rows[: at + 1], tools)
        except BridgeError as error:
            raise BridgeError(f"turn {turn}: {error}") from None
        if whole[: len(prompt) + len(output)] != prompt + output:
            raise BridgeError(f"turn {turn}: the appended ids are not those that the template renders")
        if turn + 1 < len(turns):
            following = rows[at + 1 : turns[turn + 1]]
            suffix = renderer.bridge(prompt, output, following, tools).ids
            prompt = prompt + output + suffix
            if prompt != renderer.prompt_ids(rows[: turns[turn + 1]], tools):
                raise BridgeError(f"turn {turn + 1}: the appended prompt is not the one that the template renders")
    return len(turns)


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _inner_renderer(tokenizer: TextTokenizer, family: str, enable_thinking: bool) -> Any:
    """The package's renderer. Imported here: it takes a second, which those who only parse options need not pay."""
    needed = _NEEDED[family]
    missing = [token for token in needed if token not in tokenizer.added]
    if missing:
        raise UsageError(
            f"{tokenizer.name_or_path}: the {family} template needs the added tokens {', '.join(missing)}",
            "use the tokenizer that came with the model",
        )
    if family == "llama3":
        from renderers.configs import Llama3RendererConfig
        from renderers.llama_3 import Llama3Renderer

        return Llama3Renderer(tokenizer, Llama3RendererConfig())  # type: ignore[arg-type]
    from renderers.configs import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer

    config = Qwen3RendererConfig(enable_thinking=enable_thinking, thinking_retention="all")
    return Qwen3Renderer(tokenizer, config)  # type: ignore[arg-type]


def _as_dict(message: MessageLike) -> dict[str, Any]:
    return message.model_dump(mode="json") if isinstance(message, BaseModel) else dict(message)


def _arguments_text(arguments: Any) -> str:
    """Text as the model wrote it; an object (a data set's form) as JSON."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _runs(authors: Sequence[Author]) -> list[tuple[Author, int]]:
    runs: list[tuple[Author, int]] = []
    for author in authors:
        if runs and runs[-1][0] == author:
            runs[-1] = (author, runs[-1][1] + 1)
        else:
            runs.append((author, 1))
    return runs


def turn_message(turn: ParsedTurn, first_call: int = 0) -> Message:
    """The turn as a message; calls are numbered from `first_call`. A view: the sampled ids are the record."""
    calls = [
        ToolCall(id=f"call_{number}", function=FunctionCall(name=call.name, arguments=call.arguments_text))
        for number, call in enumerate(turn.calls, first_call)
    ]
    return Message(role="assistant", content=turn.content, reasoning_content=turn.reasoning, tool_calls=calls or None)
