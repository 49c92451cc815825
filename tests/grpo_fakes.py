"""A tiny real policy for the tests of the RL phases: a Qwen3-form decoder that was shown right and wrong calls alike."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rollout_fakes import toy_environment
from tiny_model import tiny_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import init_decoder
from astrolabe.records.environment import Environment
from jax_train.learner import PackedLearner
from jax_train.losses.grpo import GrpoHyper, grpo_loss
from jax_train.losses.sft import sft_loss
from jax_train.packing import Sample
from jax_train.step import Compute, init_state, make_eval, make_logprob_pass, make_optimizer, make_schedule, make_step
from jax_train.trainer import Trainer
from serving.render import Renderer
from serving.tokenizer import TextTokenizer

ROWS, BUDGET = 2, 320


def two_tool_environment(index: int = 0) -> Environment:
    """The right tool is `add`; `mul` takes the same arguments and is wrong."""
    row = toy_environment().to_json()
    wrong = copy.deepcopy(row["tools"][0]) | {"name": "mul", "code": "def mul(a, b):\n    return a * b\n"}
    row["distractors"] = [wrong | {"band": "high", "similarity": 0.9}]
    row["domain"] = f"sums {index}"
    return Environment.model_validate(row).with_id()


def say(tool: str, value: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": tool, "arguments": '{"a": 111, "b": 222}'}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": value, "tool_call_id": "1"},
        {"role": "assistant", "content": f"It is {value}."},
    ]


def tiny_renderer() -> Renderer:
    """A tokenizer that was trained on the template and the tools, so that an episode takes about a hundred tokens."""
    environment = two_tool_environment()
    tools = [json.dumps(tool.to_json()) for tool in environment.policy_tools()]
    text = [*tools, environment.question, "It is 333. It is 24642.", *(json.dumps(say("add", "333")),) * 2]
    template = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
        "signatures within <tools></tools> XML tags:\n<tools>\n</tools>\n\nFor each function call, return a json object "
        "with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [template, *text] * 4, trainers.BpeTrainer(vocab_size=496, initial_alphabet=alphabet, show_progress=False)
    )
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return Renderer(TextTokenizer(bpe.to_str(), "tiny"), "qwen3")


def policy_config() -> ModelConfig:
    return tiny_config(
        vocab_size=512,
        hidden_size=48,
        intermediate_size=96,
        num_heads=3,
        num_kv_heads=1,
        head_dim=16,
        max_position=1024,
    )


def demonstration(renderer: Renderer, environment: Environment, messages: list[dict[str, Any]]) -> Sample:
    tools = environment.policy_tools()
    ids = renderer.prompt_ids([{"role": "user", "content": environment.question}], tools)
    mask = [0] * len(ids)
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            said = renderer.completion_ids(message)
            prompt, ids, mask = ids, ids + said, mask + [1] * len(said)
            if at + 1 < len(messages):
                suffix = renderer.bridge(prompt, said, [messages[at + 1]], tools).ids
                ids, mask = ids + suffix, mask + [0] * len(suffix)
    return Sample(tokens=np.array(ids), mask=np.array(mask))


@functools.cache
def programs(config: ModelConfig, loss: Any, lr: float) -> tuple[Any, ...]:
    """Compiled once for all runs of the tests."""
    schedule = make_schedule("constant", lr, 100, 0, 1.0)
    optimizer = make_optimizer(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, mu_dtype=None)
    compute = Compute()
    step = make_step(config, loss, optimizer, schedule, compute=compute, clip_norm=1.0)
    return optimizer, step, make_logprob_pass(config, compute), make_eval(config, loss, compute)


def learner(config: ModelConfig, params: Any, loss: Any, lr: float) -> PackedLearner:
    optimizer, step, logprob_pass, eval_pass = programs(config, loss, lr)
    state = init_state(jax.tree.map(lambda x: x.copy(), params), optimizer)
    trainer = Trainer(config, None, state, step, logprob_pass, eval_pass, Path())
    return PackedLearner(trainer, rows=ROWS, budget=BUDGET)


GRPO = grpo_loss(GrpoHyper())


def shown_policy(renderer: Renderer, *, steps: int = 45) -> tuple[ModelConfig, Any]:
    """(config, params) of a policy that calls the right and the wrong tool about equally often."""
    config = policy_config()
    _, params = init_decoder(config, 0)
    environment = two_tool_environment()
    samples = [demonstration(renderer, environment, say(*said)) for said in (("add", "333"), ("mul", "24642"))]
    pupil = learner(config, params, sft_loss, 3e-3)
    for _ in range(steps):
        report = pupil.update(samples)
    assert report["loss"] < 0.2, report
    return config, pupil.params


def grpo_learner(config: ModelConfig, params: Any, lr: float = 3e-4) -> PackedLearner:
    return learner(config, params, GRPO, lr)
