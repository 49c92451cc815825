"""Hugging Face weights in and out.

One table gives, for each weight of the decoder, its Hugging Face name and how its [out, in] matrix folds into our
axes; loading and saving both read it. Tensors are memory-mapped and put on their shards one weight at a time, so that
the host never holds more than one stacked weight beside the model.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import Params, abstract_params, param_axes
from astrolabe.model.sharding import tree_shardings
from astrolabe.records.durable import disk_guard
from astrolabe.records.errors import UsageError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that belong to the tokenizer; those that are there are copied beside exported weights."""


@dataclass(frozen=True)
class _Rule:
    """`name`: Hugging Face's, with {i} for the layer. `load`/`save`: between its matrix and our shape of one layer."""

    name: str
    load: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]


def _same(name: str) -> _Rule:
    return _Rule(name, lambda w, _: w, lambda w: w)


def _reshaped(name: str) -> _Rule:
    """A bias [heads * K] as [heads, K]."""
    return _Rule(name, lambda w, shape: w.reshape(shape), lambda w: w.reshape(-1))


def _into(name: str) -> _Rule:
    """[out, in] as [in, out...] (query, key, value, gate, up)."""
    return _Rule(name, lambda w, shape: w.T.reshape(shape), lambda w: w.reshape(w.shape[0], -1).T)


def _back(name: str) -> _Rule:
    """[out, in] as [in..., out] (o, down)."""
    return _Rule(name, lambda w, shape: w.T.reshape(shape), lambda w: w.reshape(-1, w.shape[-1]).T)


_TOP = {
    "embed": _same("model.embed_tokens.weight"),
    "norm": _same("model.norm.weight"),
    "head": _same("lm_head.weight"),
}
_LAYER = {
    "attn_norm": _same("model.layers.{i}.input_layernorm.weight"),
    "q": _into("model.layers.{i}.self_attn.q_proj.weight"),
    "k": _into("model.layers.{i}.self_attn.k_proj.weight"),
    "v": _into("model.layers.{i}.self_attn.v_proj.weight"),
    "o": _back("model.layers.{i}.self_attn.o_proj.weight"),
    "q_norm": _same("model.layers.{i}.self_attn.q_norm.weight"),
    "k_norm": _same("model.layers.{i}.self_attn.k_norm.weight"),
    "q_bias": _reshaped("model.layers.{i}.self_attn.q_proj.bias"),
    "k_bias": _reshaped("model.layers.{i}.self_attn.k_proj.bias"),
    "v_bias": _reshaped("model.layers.{i}.self_attn.v_proj.bias"),
    "mlp_norm": _same("model.layers.{i}.post_attention_layernorm.weight"),
    "gate": _into("model.layers.{i}.mlp.gate_proj.weight"),
    "up": _into("model.layers.{i}.mlp.up_proj.weight"),
    "down": _back("model.layers.{i}.mlp.down_proj.weight"),
}


def load_params(folder: Path | str, config: ModelConfig, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> Params:
    """The weights of a Hugging Face folder as params of `dtype`, on their shards where there is a mesh.

    Raises UsageError where a tensor is missing, has another shape than the config says, or a file cannot be read.
    """
    folder = Path(folder)
    files = _tensor_files(folder)
    shardings = tree_shardings(mesh, param_axes(config)) if mesh is not None else None

    def read(name: str, shape: tuple[int, ...], rule: _Rule) -> np.ndarray:
        if name not in files:
            raise UsageError(f"{folder} has no tensor {name}", "check that the weights belong to this config.json")
        with safe_open(files[name], framework="flax" if _is_bfloat16(files[name], name) else "numpy") as source:
            tensor = np.asarray(source.get_tensor(name))
        if tensor.size != int(np.prod(shape)):
            raise UsageError(
                f"tensor {name} has shape {tensor.shape}, the config needs {shape}",
                "check that the weights belong to this config.json",
            )
        return rule.load(tensor, shape)

    def put(array: np.ndarray, sharding: Any) -> jax.Array:
        return jax.device_put(array.astype(dtype), sharding)

    out: Params = {"layers": {}}
    for key, abstract in abstract_params(config).items():
        if key == "layers":
            continue
        array = read(_TOP[key].name, abstract.shape, _TOP[key])
        out[key] = put(array, None if shardings is None else shardings[key])
    for key, abstract in abstract_params(config)["layers"].items():
        rule, shape = _LAYER[key], abstract.shape[1:]
        stack = np.stack([read(rule.name.format(i=i), shape, rule) for i in range(config.num_layers)])
        out["layers"][key] = put(stack, None if shardings is None else shardings["layers"][key])
    return out


def save_params(
    params: Params, config: ModelConfig, folder: Path | str, tokenizer_dir: Path | str | None = None, dtype: Any = None
) -> Path:
    """Write `model.safetensors`, `config.json` and the tokenizer's files into `folder`, each by temp file and rename.

    The folder loads in transformers and SGLang. `dtype` None keeps the params' dtype. Returns the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(w if dtype is None else w.astype(dtype)) for name, w in _hf_tensors(params, config)
    }
    kind = str(next(iter(tensors.values())).dtype)
    _replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    row = json.dumps({**config.to_hf(), "torch_dtype": kind}, indent=2)
    _replace(folder / "config.json", lambda path: path.write_text(row + "\n"))
    if tokenizer_dir is not None:
        for name in TOKENIZER_FILES:
            source = Path(tokenizer_dir) / name
            if source.is_file() and source.resolve() != (folder / name).resolve():
                _replace(folder / name, partial(shutil.copyfile, source))
    return folder


def _hf_tensors(params: Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in params.items():
        if key != "layers":
            yield _TOP[key].name, _TOP[key].save(np.asarray(value))
    for key, value in params["layers"].items():
        stack = np.asarray(value)
        for i in range(config.num_layers):
            yield _LAYER[key].name.format(i=i), _LAYER[key].save(stack[i])


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, by the index where the weights are split, else from the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UsageError(
            f"no model.safetensors in {folder}", "give a Hugging Face model folder with safetensors weights"
        )
    try:
        with safe_open(single, framework="numpy") as source:
            return dict.fromkeys(source.keys(), single)
    except SafetensorError as error:
        raise UsageError(f"{single} cannot be read: {error}", "copy the file again; it is damaged") from error


def _is_bfloat16(path: Path, name: str) -> bool:
    with safe_open(path, framework="numpy") as source:
        return source.get_slice(name).get_dtype() == "BF16"


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside `path`, then rename: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with storage_guard(path):
        write(temporary)
        temporary.chmod(0o644)  # safetensors makes files for their owner alone
        os.replace(temporary, path)


@contextmanager
def storage_guard(path: Path) -> Iterator[None]:
    """`disk_guard` for writers in other languages, which tell a full disk in the text of an error of their own."""
    with disk_guard(path):
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            code = next((c for c in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) if os.strerror(c) in str(error)), None)
            if code is None:
                raise
            raise OSError(code, os.strerror(code)) from error
