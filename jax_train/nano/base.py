"""The base checkpoint of the nano policy, made again from a seed: `python -m jax_train.nano --out DIR` (`make nano-base`).

    project texts -> tokenizer -> config and first weights -> drills and episodes -> steps -> a Hugging Face folder

Most steps are on drills at first, on whole episodes at the end. Nothing is met twice: the rows of each step are made
for it, from seeds.

Weights are stored in bfloat16 (they are trained in float32), so that the folder stays under 8 MB.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import head_weights, hidden
from astrolabe.model.safetensors_io import save_params
from astrolabe.records.jsonl import read_rows
from jax_train.losses.sft import sft_loss
from jax_train.nano import corpus, drill
from jax_train.nano.init import init_copying
from jax_train.nano.tokenizer import save_tokenizer, train_tokenizer
from jax_train.packing import PackedBatch, Sample, pack, stack
from jax_train.step import Compute, init_state, make_eval, make_optimizer, make_schedule, make_step
from serving.render import Renderer

OFTEN = 30
"""How often the tokenizer meets each English text of the project's: its words must be whole tokens, as a large
tokenizer's are, for words are what a tool and a question are matched by."""


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """Every number that decides the base."""

    seed: int = 0
    vocab_size: int = 4096
    hidden_size: int = 160
    intermediate_size: int = 432
    layers: int = 4
    heads: int = 5
    head_dim: int = 32
    redundancy: float = 0.3
    """Share of episodes with calls that are made again."""
    max_nodes: int = 6
    tokens: int = 2048
    """Of one step."""
    budget: int = 512
    """Tokens of a row of episodes; a row of drills has half."""
    drills: float = 0.85
    drills_at_end: float = 0.3
    """Share of the steps that are on drills, first and last; between them it falls evenly."""
    steps: int = 7000
    lr: float = 2e-3
    warmup: int = 100
    log_every: int = 200


def write_tokenizer(recipe: BaseRecipe, folder: Path, knowledge: list[Path]) -> int:
    """Train and save the tokenizer; its size."""
    words = list(corpus.texts(recipe.seed, 3000))
    for file in knowledge:
        for _, row in read_rows(file):
            words.append(row["text"])
            if row["language"] == "en":
                single = re.findall("[A-Za-z]+", row["text"])
                # Each word behind a space, behind an underscore and alone: as in a question and in a tool's name.
                words += [row["text"], "_" + "_".join(single), "\n".join(single)] * OFTEN
    tokenizer = train_tokenizer(words, recipe.vocab_size)
    save_tokenizer(tokenizer, folder)
    return tokenizer.get_vocab_size()


def tokens_of(folder: Path) -> list[str]:
    """The token of each id."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]


def write_config(recipe: BaseRecipe, folder: Path, vocab_size: int) -> ModelConfig:
    """The model's `config.json`."""
    row = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return ModelConfig.from_hf(folder)


@dataclass(frozen=True)
class Rows:
    """The two kinds of training rows, made from a seed."""

    renderer: Renderer
    words: corpus.Words
    recipe: BaseRecipe

    @classmethod
    def of(cls, recipe: BaseRecipe, folder: Path) -> Rows:
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=False)
        return cls(Renderer.from_folder(folder), corpus.Words.of(vocabulary), recipe)

    def drills(self, seed: int, tokens: int) -> list[PackedBatch]:
        budget = self.recipe.budget // 2
        return self._packed(drill.drills(self.renderer, self.words, seed, budget), budget, tokens)

    def episodes(self, seed: int, tokens: int) -> list[PackedBatch]:
        made = corpus.samples(
            self.renderer,
            self.words,
            seed,
            max_nodes=self.recipe.max_nodes,
            redundancy=self.recipe.redundancy,
            max_len=self.recipe.budget,
        )
        return self._packed(made, self.recipe.budget, tokens)

    def _packed(self, made: Iterator[Sample], budget: int, tokens: int) -> list[PackedBatch]:
        """Batches of about `tokens` tokens in all."""
        samples: list[Sample] = []
        while tokens > 0:
            samples.append(next(made))
            tokens -= len(samples[-1])
        return pack(samples, self.recipe.tokens // budget, budget, vocab_size=self.renderer.vocab_size)[0]


def stream(rows: Rows, recipe: BaseRecipe) -> Iterator[PackedBatch]:
    """The batch of every step. Both kinds are made and packed twenty steps at a time."""
    rng = np.random.default_rng(recipe.seed)
    kinds: tuple[Callable[[int, int], list[PackedBatch]], ...] = (rows.drills, rows.episodes)
    ready: tuple[list[PackedBatch], list[PackedBatch]] = ([], [])
    made = 0
    for done in range(recipe.steps):
        share = recipe.drills + (recipe.drills_at_end - recipe.drills) * done / recipe.steps
        kind = int(rng.random() >= share)
        if not ready[kind]:
            made += 1
            ready[kind].extend(kinds[kind](recipe.seed * 1_000_003 + made, 20 * recipe.tokens))
            rng.shuffle(ready[kind])  # type: ignore[arg-type]
        yield ready[kind].pop()


def name_accuracy(params: Any, config: ModelConfig, rows: Rows, batches: Sequence[PackedBatch]) -> float:
    """Share of called tools whose whole name is the most likely one, each token given the ones before it."""
    opening, closing = (rows.renderer.encode(text)[0] for text in ('\n{"name": "', '", "arguments": '))
    right = total = 0
    for batch in batches:
        guess = np.asarray(_most_likely(params, config, batch))
        for tokens, guessed, mask in zip(np.asarray(batch.tokens), guess, np.asarray(batch.mask), strict=True):
            for start in np.flatnonzero((tokens == opening) & (mask > 0)) + 1:
                end = start + int(np.argmax(tokens[start:] == closing)) + 1
                total += 1
                right += bool((tokens[start:end] == guessed[start - 1 : end - 1]).all())
    return right / max(1, total)


@functools.partial(jax.jit, static_argnums=1)
def _most_likely(params: Any, config: ModelConfig, batch: PackedBatch) -> jax.Array:
    states = hidden(params, config, batch.tokens, batch.positions, batch.segment_ids)
    return (states @ head_weights(params).T).argmax(-1)


def train(recipe: BaseRecipe, folder: Path, log: Any = print) -> None:
    """Train first weights for `recipe.steps` steps; the weights are written at every log line and at the end."""
    config = ModelConfig.from_hf(folder)
    rows = Rows.of(recipe, folder)
    held_out = {"drills": rows.drills(-1, 4 * recipe.tokens), "episodes": rows.episodes(-2, 12 * recipe.tokens)}
    schedule = make_schedule("cosine", recipe.lr, recipe.steps, recipe.warmup, 0.02)
    optimizer = make_optimizer(schedule, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.05, mu_dtype=None)
    compute = Compute(unroll=recipe.layers, chunk=256)
    step = make_step(config, sft_loss, optimizer, schedule, compute=compute, clip_norm=1.0)
    evaluate = make_eval(config, sft_loss, compute)
    state = init_state(jax.tree.map(jnp.asarray, init_copying(config, recipe.seed, tokens_of(folder))), optimizer)
    began = time.monotonic()
    for done, batch in enumerate(stream(rows, recipe), 1):
        state, _ = step(state, stack([batch]))
        if done % recipe.log_every == 0 or done == recipe.steps:
            said = []
            for kind, batches in held_out.items():
                parts = jax.device_get([evaluate(state.params, b) for b in batches])
                names = name_accuracy(state.params, config, rows, batches)
                said.append(
                    f"{kind} held-out {sum(p[0] for p in parts) / sum(p[1] for p in parts):.4f} names {names:.3f}"
                )
            log(f"step {done}/{recipe.steps} {' '.join(said)} {time.monotonic() - began:.0f} s")
            save_params(jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params), config, folder)


def make_base(recipe: BaseRecipe, folder: Path, knowledge: list[Path], log: Any = print) -> Path:
    """The whole recipe; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(recipe, folder, knowledge)
    write_config(recipe, folder, vocab_size)
    log(f"tokenizer of {vocab_size} entries")
    train(recipe, folder, log)
    return folder
