"""Stand-ins for the tests of the agent loop: an executor, a scripted token server, and a tiny Qwen3 renderer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from astrolabe.records.environment import Environment
from astrolabe.records.trajectory import CallError, CallRecord
from serving.render import Renderer
from serving.tokenizer import TextTokenizer
from serving.tokens import Generation, Sampling


class Echo:
    """Answers a call with its arguments; tools named in `failing` give that error."""

    def __init__(
        self, failing: dict[str, CallError] | None = None, *, injected: bool = False, hang: bool = False
    ) -> None:
        self.records: list[CallRecord] = []
        self.failing, self.injected, self.hang = failing or {}, injected, hang

    async def execute(self, call_id: str, turn: int, name: str, arguments_text: str) -> tuple[CallRecord, str]:
        if self.hang:
            await asyncio.sleep(60)
        try:
            arguments, error = json.loads(arguments_text), self.failing.get(name)
        except ValueError:
            arguments, error = None, CallError.model_validate({"class": "policy", "kind": "malformed"})
        record = CallRecord(
            id=call_id,
            turn=turn,
            tool=name,
            arguments=arguments,
            status="error" if error else "ok",
            error=error,
            value=None if error else arguments,
            injected=self.injected,
        )
        self.records.append(record)
        return record, f"Error: {error.kind}" if error else arguments_text


def make_renderer(*, thinking: bool = False) -> Renderer:
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["HAVING HAV ING AVING the count of things name arguments 你好"] * 3, trainer)
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return Renderer(TextTokenizer(bpe.to_str(), "tiny"), "qwen3", enable_thinking=thinking)


@dataclass
class Server:
    """Answers each prompt with the next scripted turn: a text, ids, an exception, or (ids, finish)."""

    renderer: Renderer
    script: list
    prompts: list[list[int]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    async def generate(self, input_ids, sampling, *, rid=None):
        self.prompts.append(list(input_ids))
        self.samplings.append(sampling)
        turn = self.script.pop(0)
        if isinstance(turn, Exception):
            raise turn
        ids, finish = turn if isinstance(turn, tuple) else (turn, "stop")
        ids = self.renderer.encode(ids) if isinstance(ids, str) else list(ids)
        self.outputs.append(ids)
        logprobs = [-0.5 - 0.001 * i for i in range(len(ids))]
        return Generation(ids, logprobs, finish, len(input_ids), 0, weight_version=len(self.prompts))

    async def abort(self, rid=None): ...


ADD = "def add(a, b):\n    return a + b\n"


def toy_environment(a: int = 111, b: int = 222) -> Environment:
    """One question, one tool that answers it; small enough for the tests, whole enough for the executor and the reward."""
    integer = {"type": "integer"}
    row = {
        "schema": "astrolabe.environment/1",
        "language": "en",
        "domain": "sums",
        "question": f"What is {a} plus {b}?",
        "answer": str(a + b),
        "scenario": "single_hop",
        "expect": "answer",
        "answer_type": "number",
        "nodes": [{"id": "n1", "question": f"{a} + {b}?", "answer": a + b, "parents": [], "tool": "add"}],
        "tools": [
            {
                "name": "add",
                "description": "Adds two whole numbers.",
                "parameters": {"type": "object", "properties": {"a": integer, "b": integer}, "required": ["a", "b"]},
                "code": ADD,
            }
        ],
        "goldens": [{"node": "n1", "tool": "add", "arguments": {"a": a, "b": b}, "returns": a + b}],
        "provenance": {"source": "test", "license": "CC0-1.0"},
    }
    return Environment.model_validate(row).with_id()
