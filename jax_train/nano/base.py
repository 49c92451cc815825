"""The base checkpoint of the nano policy, made again from a seed: `python -m jax_train.nano --out DIR` (`make nano-base`).

    project texts -> tokenizer -> config and first weights -> made-up episodes -> steps -> a Hugging Face folder

Weights are stored in bfloat16 (they are trained in float32), so that the folder stays under 8 MB.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from astrolabe.model.config import ModelConfig
from astrolabe.model.safetensors_io import save_params
from astrolabe.records.jsonl import read_rows
from jax_train.losses.sft import sft_loss
from jax_train.nano import corpus
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
    episodes: int = 20000
    redundancy: float = 0.3
    max_nodes: int = 6
    rows: int = 4
    budget: int = 512
    steps: int = 4000
    lr: float = 1.2e-3
    warmup: int = 100


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


def _episodes(folder: str, recipe: BaseRecipe, seed: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    renderer = Renderer.from_folder(folder)
    words = corpus.Words.of(Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab(with_added_tokens=False))
    made = corpus.samples(
        renderer, words, seed, max_nodes=recipe.max_nodes, redundancy=recipe.redundancy, max_len=recipe.budget
    )
    return [(np.asarray(s.tokens), np.asarray(s.mask)) for s in itertools.islice(made, count)]


def make_samples(recipe: BaseRecipe, folder: Path, count: int, workers: int = 2) -> list[Sample]:
    """`count` episodes as token rows, made by processes of their own in slices of fixed seeds."""
    size = 250
    seeds = range(recipe.seed * 1_000_003 + 1, recipe.seed * 1_000_003 + 1 + -(-count // size))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        parts = pool.map(_episodes, *zip(*[(str(folder), recipe, seed, size) for seed in seeds], strict=True))
        rows = [row for part in parts for row in part]
    return [Sample(tokens=tokens, mask=mask) for tokens, mask in rows[:count]]


def _batches(samples: list[Sample], recipe: BaseRecipe, vocab_size: int, epoch: int) -> list[PackedBatch]:
    order = np.random.default_rng([recipe.seed, epoch]).permutation(len(samples))
    # First-fit decreasing over everything would sort the rows by length; packing slices of an epoch keeps them mixed.
    out: list[PackedBatch] = []
    for start in range(0, len(order), 400):
        chosen = [samples[i] for i in order[start : start + 400]]
        out += pack(chosen, recipe.rows, recipe.budget, vocab_size=vocab_size)[0]
    return out


def train(recipe: BaseRecipe, folder: Path, samples: list[Sample], held_out: list[Sample], log: Any = print) -> None:
    """Train first weights for `recipe.steps` steps; the weights are written every hundred and at the end."""
    config = ModelConfig.from_hf(folder)
    schedule = make_schedule("cosine", recipe.lr, recipe.steps, recipe.warmup, 0.05)
    optimizer = make_optimizer(schedule, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.05, mu_dtype=None)
    compute = Compute(unroll=recipe.layers)
    step = make_step(config, sft_loss, optimizer, schedule, compute=compute, clip_norm=1.0)
    evaluate = make_eval(config, sft_loss, compute)
    held = pack(held_out, recipe.rows, recipe.budget, vocab_size=config.vocab_size)[0]
    state = init_state(jax.tree.map(jnp.asarray, init_copying(config, recipe.seed)), optimizer)
    done, epoch, began = 0, 0, time.monotonic()
    while done < recipe.steps:
        for batch in _batches(samples, recipe, config.vocab_size, epoch):
            state, report = step(state, stack([batch]))
            done += 1
            if done % 100 == 0 or done == recipe.steps:
                parts = jax.device_get([evaluate(state.params, b) for b in held])
                loss = sum(p[0] for p in parts) / sum(p[1] for p in parts)
                log(
                    f"step {done}/{recipe.steps} epoch {epoch} loss {float(report['loss']):.4f} "
                    f"held-out {loss:.4f} {time.monotonic() - began:.0f} s"
                )
                save_params(jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params), config, folder)
            if done == recipe.steps:
                break
        epoch += 1


def make_base(recipe: BaseRecipe, folder: Path, knowledge: list[Path], log: Any = print) -> Path:
    """The whole recipe; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(recipe, folder, knowledge)
    write_config(recipe, folder, vocab_size)
    log(f"tokenizer of {vocab_size} entries")
    samples = make_samples(recipe, folder, recipe.episodes + 200)
    held_out, samples = samples[:200], samples[200:]
    log(f"{len(samples)} episodes, {sum(map(len, samples))} tokens")
    train(recipe, folder, samples, held_out, log)
    return folder
