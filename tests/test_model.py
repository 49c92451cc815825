"""The decoder: equal to a plain numpy reading of the Hugging Face forms, packed equal to alone, weights in and out."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from train_fakes import LLAMA, QWEN2, QWEN3, VOCAB, flat

from astrolabe.model import safetensors_io
from astrolabe.model.attention import attend, packed_attention
from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import abstract_params, decode, head_weights, hidden, init_cache, init_decoder, param_axes
from astrolabe.model.safetensors_io import load_params, save_params
from astrolabe.records.errors import RunError, UsageError

RUN = jax.jit(hidden, static_argnums=1)


def rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def reference_hidden(tensors: dict[str, np.ndarray], row: dict, ids: np.ndarray) -> np.ndarray:
    """The forward pass as Hugging Face's code has it, in float64, from its tensor names and config.json: [T, D]."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, kv, k, eps = row["num_attention_heads"], row["num_key_value_heads"], row["head_dim"], row["rms_norm_eps"]
    inv = 1.0 / row["rope_theta"] ** (np.arange(0, k, 2) / k)
    if row["rope_scaling"]:
        s = row["rope_scaling"]
        old = s["original_max_position_embeddings"]
        for i, f in enumerate(inv):
            wavelength = 2 * np.pi / f
            if wavelength > old / s["low_freq_factor"]:
                inv[i] = f / s["factor"]
            elif wavelength > old / s["high_freq_factor"]:
                smooth = (old / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
                inv[i] = (1 - smooth) * f / s["factor"] + smooth * f
    t = len(ids)
    angles = np.concatenate([np.outer(np.arange(t), inv)] * 2, axis=-1)[:, None]

    def rope(x: np.ndarray) -> np.ndarray:
        rotated = np.concatenate([-x[..., k // 2 :], x[..., : k // 2]], axis=-1)
        return x * np.cos(angles) + rotated * np.sin(angles)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(row["num_hidden_layers"]):
        at = f"model.layers.{i}."
        y = rms(x, w[at + "input_layernorm.weight"], eps)
        parts = []
        for name, n in (("q", heads), ("k", kv), ("v", kv)):
            z = y @ w[f"{at}self_attn.{name}_proj.weight"].T + w.get(f"{at}self_attn.{name}_proj.bias", 0.0)
            z = z.reshape(t, n, k)
            if f"{at}self_attn.{name}_norm.weight" in w:
                z = rms(z, w[f"{at}self_attn.{name}_norm.weight"], eps)
            parts.append(z if name == "v" else rope(z))
        q, keys, values = parts[0], *(np.repeat(p, heads // kv, axis=1) for p in parts[1:])
        scores = np.einsum("thk,shk->hts", q, keys) / np.sqrt(k)
        scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shk->thk", weights, values).reshape(t, -1) @ w[at + "self_attn.o_proj.weight"].T
        y = rms(x, w[at + "post_attention_layernorm.weight"], eps)
        gate = y @ w[at + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"], eps)


def row_of(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return ids[None], np.arange(len(ids), dtype=np.int32)[None], np.ones((1, len(ids)), np.int32)


@pytest.mark.parametrize("config", [QWEN3, LLAMA, QWEN2], ids=lambda c: c.model_type)
def test_the_decoder_is_the_hugging_face_form_and_its_weights_come_back(config: ModelConfig, tmp_path: Path) -> None:
    params = init_decoder(config, 0)[1]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.asarray(x + rng.normal(0, 0.1, x.shape), np.float32), params)
    save_params(params, config, tmp_path)
    assert ModelConfig.from_hf(tmp_path) == config
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (not config.tie_embeddings)
    assert sum(t.size for t in tensors.values()) == config.num_params
    back = load_params(tmp_path, config)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), params, back))
    assert head_weights(back).shape == (VOCAB, config.hidden_size)
    ids = rng.integers(0, VOCAB, 20).astype(np.int32)
    expected = reference_hidden(tensors, json.loads((tmp_path / "config.json").read_text()), ids)
    assert np.abs(np.asarray(RUN(back, config, *row_of(ids)))[0] - expected).max() < 2e-5


def test_the_rope_base_is_the_configs() -> None:
    params = init_decoder(QWEN3, 0)[1]
    ids = row_of(np.arange(12, dtype=np.int32))
    a, b = (np.asarray(RUN(params, replace(QWEN3, rope_theta=theta), *ids)) for theta in (1e4, 1e6))
    assert np.abs(a - b).max() > 1e-4


def test_cached_decoding_in_chunks_and_single_tokens_equals_the_packed_pass() -> None:
    params = init_decoder(QWEN3, 0)[1]
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 12)).astype(np.int32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    expected = np.asarray(RUN(params, QWEN3, ids, positions, np.ones_like(ids)))
    run = jax.jit(partial(decode, window=16), static_argnums=1, donate_argnums=2)
    cache = init_cache(QWEN3, slots=4, max_len=24)
    slots = np.array([2, 0], np.int32)
    found = np.zeros_like(expected)
    # Chunks of 4: row 0 goes ahead first while row 1 idles, and the last chunk is half padding.
    for first, last in (((0, 4), (0, 0)), ((4, 8), (0, 4)), ((8, 10), (4, 8)), ((10, 12), (8, 12))):
        chunk, where = np.zeros((2, 4), np.int32), np.zeros((2, 4), np.int32)
        valid = np.zeros((2, 4), bool)
        for b, (start, end) in enumerate((first, last)):
            n = end - start
            chunk[b, :n], where[b, :n], valid[b, :n] = ids[b, start:end], positions[b, start:end], True
        out, cache = run(params, QWEN3, cache, slots, chunk, where, valid)
        for b, (start, end) in enumerate((first, last)):
            found[b, start:end] = np.asarray(out)[b, : end - start]
    assert np.abs(found - expected).max() < 1e-5
    assert not np.asarray(cache["k"])[:, [1, 3]].any()  # other slots are untouched


def test_c22_a_segment_is_what_it_is_alone_and_padding_is_finite() -> None:
    params = init_decoder(QWEN3, 0)[1]
    a, b = np.arange(3, 10, dtype=np.int32), np.arange(20, 26, dtype=np.int32)
    ids = np.zeros((1, 20), np.int32)
    positions, segments = np.zeros_like(ids), np.zeros_like(ids)
    for number, (start, part) in enumerate(((0, a), (7, b)), 1):
        span = slice(start, start + len(part))
        ids[0, span], positions[0, span], segments[0, span] = part, np.arange(len(part)), number
    packed = np.asarray(RUN(params, QWEN3, ids, positions, segments))
    assert np.isfinite(packed).all()
    for start, part in ((0, a), (7, b)):
        alone = np.zeros((1, 20), np.int32)
        where, own = np.zeros_like(alone), np.zeros_like(alone)
        left = 20 - len(part)  # left-padded, positions from 0
        alone[0, left:], where[0, left:], own[0, left:] = part, np.arange(len(part)), 1
        single = np.asarray(RUN(params, QWEN3, alone, where, own))[0, left:]
        assert np.abs(packed[0, start : start + len(part)] - single).max() < 1e-5


def test_blocks_of_queries_equal_one_dense_attention() -> None:
    rng = np.random.default_rng(0)
    q = jax.numpy.asarray(rng.normal(size=(1, 300, 1, 2, 4)), np.float32)
    k, v = jax.numpy.asarray(rng.normal(size=(2, 1, 300, 1, 4)), np.float32)
    segments = jax.numpy.repeat(jax.numpy.array([[1, 2, 0]]), 100, axis=1)
    seen = (segments[:, :, None] == segments[:, None]) & np.tril(np.ones((300, 300), bool))
    found, expected = jax.jit(packed_attention)(q, k, v, segments), jax.jit(attend)(q, k, v, seen)
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-5


def test_d27_a_row_with_every_key_masked_is_finite_forward_and_backward() -> None:
    q, k, v = (np.ones(shape, np.float32) for shape in ((1, 2, 1, 1, 4), (1, 3, 1, 4), (1, 3, 1, 4)))
    mask = np.zeros((1, 2, 3), bool)
    value, grads = jax.jit(jax.value_and_grad(lambda *a: attend(*a, mask).sum(), argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    assert np.isfinite(flat(grads)).all()


def test_first_weights_depend_on_the_seed_alone() -> None:
    a, b, c = (flat(init_decoder(QWEN3, seed)[1]) for seed in (0, 0, 1))
    assert (a == b).all()
    assert (a != c).any()


def test_every_weight_has_an_axis_name_per_dimension() -> None:
    for config in (QWEN3, LLAMA, QWEN2):
        shapes, axes = abstract_params(config), param_axes(config)
        jax.tree.map(lambda s, a: pytest.fail(f"{s} {a}") if len(s.shape) != len(a) else None, shapes, axes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelConfig.from_hf({**QWEN3.to_hf(), **change})


def test_a_config_without_a_needed_field_names_it() -> None:
    row = LLAMA.to_hf()
    del row["rope_theta"]
    with pytest.raises(UsageError, match="rope_theta"):
        ModelConfig.from_hf(row)
    with pytest.raises(UsageError, match=r"no config\.json"):
        ModelConfig.from_hf(Path("/nonexistent"))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_params(init_decoder(QWEN3, 0)[1], QWEN3, tmp_path)
    with pytest.raises(UsageError, match="lm_head"):
        load_params(tmp_path, replace(QWEN3, tie_embeddings=False))
    with pytest.raises(UsageError, match="shape"):
        load_params(tmp_path, replace(QWEN3, intermediate_size=40))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="cannot be read"):
        load_params(tmp_path, QWEN3)


def test_sharded_files_and_bfloat16_are_read(tmp_path: Path) -> None:
    params = init_decoder(QWEN3, 0)[1]
    save_params(params, QWEN3, tmp_path, dtype=jax.numpy.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, tmp_path / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert np.abs(flat(load_params(tmp_path, QWEN3)) - flat(params)).max() < 0.01


def test_a_full_disk_is_an_error_with_a_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors_io, "save_file", full)
    with pytest.raises(RunError, match="free some space"):
        save_params(init_decoder(QWEN3, 0)[1], QWEN3, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[]"])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"config\.json: not a JSON object"):
        ModelConfig.from_hf(tmp_path)
