"""The nano tokenizer: byte-level BPE on the project's own texts, with the chat template's fixed text as single tokens.

A prompt is mostly template (the tools header, the scaffolding of a JSON schema). As whole tokens these fragments cost
one id each instead of dozens, which makes an episode of three calls about 250 tokens long. They are added tokens, so
the plain encoder, which tool, user and system text goes through, never yields them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from renderers import qwen3
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTROL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
FRAGMENTS = (
    qwen3._TOOLS_HEADER,
    qwen3._TOOLS_FOOTER,
    '\n{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}',
    '": {"type": "integer"}',
    '": {"type": "number"}',
    '": {"type": "boolean"}',
    '": {"type": "string", "enum": ["',
    '", "',
    ', "',
    '}, "required": ["',
    '"]}}}',
    '"]}',
    '\n{"name": "',
    '", "arguments": ',
    "}\n",
    "<think>\n\n</think>\n\n",
    "system\n",
    "user\n",
    "user",
    "assistant\n",
)
"""Longest match first is the tokenizer's own rule; none of them holds a control token that is parsed out of a turn."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of about `vocab_size` entries. Digits are kept single (numbers are copied, not remembered). A space
    or an underscore belongs to the word behind it, so that words are neighbours in a question as in a tool's name;
    that ` wing` and `_wing` are one word is told to the policy by its first weights (`init.py`)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[ _]?\p{L}+|'s|\p{N}|\s|[^\p{L}\p{N}\s]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL) - len(CONTROL) - len(FRAGMENTS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.add_special_tokens(list(SPECIAL))
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*CONTROL, *FRAGMENTS)])
    return bpe


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as `Renderer.from_folder` and transformers read them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
