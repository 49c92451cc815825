"""The decoder: Qwen3, Qwen2 and Llama forms of one Flax NNX module, with stacked layers.

Each weight is declared once, with its shape, logical axes and scale; abstract shapes, shardings, loading and saving
are derived from that declaration. Layers carry a leading axis L and run under `lax.scan`. Users hold the weights as a
plain nested dict (`params`), and the functions below merge it into the module while tracing, so that jit, grad and
optax see arrays only. The packed pass (`hidden`) and the cached pass (`decode`) share every line but the attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from astrolabe.model.attention import cached_attention, packed_attention
from astrolabe.model.config import ModelConfig
from astrolabe.model.sharding import gathered, spec, tree_shardings
from astrolabe.records.ids import seed_for

Params = dict[str, Any]
"""{"embed" [V,D], "norm" [D], "head" [V,D] unless tied, "layers": {name: [L,...]}}."""
Cache = dict[str, jax.Array]
"""{"k","v"}: [L, slots, max_len, N, K]."""

REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""Rematerialisation of a layer by name: none keeps all activations, full keeps only a layer's input."""


def _weight(shape: tuple[int, ...], axes: tuple[str, ...], scale: float | None) -> nnx.Param:
    """A weight with its logical axes; `scale`: deviation of its first values (None: they are ones, 0: zeros).

    `init_decoder` draws the values on the host, since compiling a dozen generators costs more than a small model's
    whole training step; the module itself is only ever traced for its shapes.
    """
    return nnx.Param(jnp.zeros(shape), axes=axes, scale=scale)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, in float32, times scale [D]; returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Rotation per position [K/2] in radians, with Llama 3 scaling where the config has it (float64)."""
    inv = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return inv
    wavelength = 2 * np.pi / inv
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inv / scaling.factor + smooth * inv
    return np.where(wavelength > low, inv / scaling.factor, np.where(wavelength < high, inv, blended))


def rope_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B,T,1,K/2] in float32 for positions [B,T]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope_frequencies(config), jnp.float32)
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the halves of x [B,T,H,K] (Hugging Face's `rotate_half` order)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Layer(nnx.Module):
    """All layers' weights, stacked; as a function, one layer (the scan slices the leading axis away)."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        n, d, f, k = config.num_layers, config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv = config.num_heads, config.num_kv_heads
        scale = d**-0.5
        residual = (2 * n) ** -0.5  # keeps the residual stream's variance independent of depth
        self.attn_norm = _weight((n, d), ("layers", "norm"), None)
        self.q = _weight((n, d, heads, k), ("layers", "embed", "heads", "head_dim"), scale)
        self.k = _weight((n, d, kv, k), ("layers", "embed", "kv_heads", "head_dim"), scale)
        self.v = _weight((n, d, kv, k), ("layers", "embed", "kv_heads", "head_dim"), scale)
        self.o = _weight((n, heads, k, d), ("layers", "heads", "head_dim", "embed"), (heads * k) ** -0.5 * residual)
        if config.qk_norm:
            self.q_norm = _weight((n, k), ("layers", "norm"), None)
            self.k_norm = _weight((n, k), ("layers", "norm"), None)
        if config.qkv_bias:
            self.q_bias = _weight((n, heads, k), ("layers", "heads", "head_dim"), 0)
            self.k_bias = _weight((n, kv, k), ("layers", "kv_heads", "head_dim"), 0)
            self.v_bias = _weight((n, kv, k), ("layers", "kv_heads", "head_dim"), 0)
        self.mlp_norm = _weight((n, d), ("layers", "norm"), None)
        self.gate = _weight((n, d, f), ("layers", "embed", "mlp"), scale)
        self.up = _weight((n, d, f), ("layers", "embed", "mlp"), scale)
        self.down = _weight((n, f, d), ("layers", "mlp", "embed"), f**-0.5 * residual)

    def qkv(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B,T,D] -> rotated queries [B,T,H,K] and keys [B,T,N,K], values [B,T,N,K]."""
        c = self.config

        def project(w: nnx.Param, bias: nnx.Param | None, heads: str) -> jax.Array:
            y = jnp.einsum(
                "btd,dhk->bthk",
                x,
                gathered(w[...], "embed", heads, "head_dim"),
                out_sharding=spec("batch", "length", heads, "head_dim"),
            )
            return y if bias is None else y + bias[...]

        q = project(self.q, self.q_bias if c.qkv_bias else None, "heads")
        k = project(self.k, self.k_bias if c.qkv_bias else None, "kv_heads")
        v = project(self.v, self.v_bias if c.qkv_bias else None, "kv_heads")
        if c.qk_norm:
            q = rms_norm(q, self.q_norm[...], c.rms_norm_eps)
            k = rms_norm(k, self.k_norm[...], c.rms_norm_eps)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def mlp(self, x: jax.Array) -> jax.Array:
        """SwiGLU, x [B,T,D] -> [B,T,D]."""
        out = spec("batch", "length", "mlp")
        gate = jnp.einsum("btd,df->btf", x, gathered(self.gate[...], "embed", "mlp"), out_sharding=out)
        up = jnp.einsum("btd,df->btf", x, gathered(self.up[...], "embed", "mlp"), out_sharding=out)
        return jnp.einsum(
            "btf,fd->btd",
            jax.nn.silu(gate) * up,
            gathered(self.down[...], "mlp", "embed"),
            out_sharding=spec("batch", "length", "act_embed"),
        )

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attention: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """One layer. `attention(q [B,T,N,G,K], k [B,T,N,K], v) -> [B,T,N,G,K]` decides what is seen, and may keep k and v."""
        c = self.config
        b, t, _ = x.shape
        grouped = (b, t, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        with jax.named_scope("attention"):
            q, k, v = self.qkv(rms_norm(x, self.attn_norm[...], c.rms_norm_eps), cos, sin)
            q = q.reshape(grouped, out_sharding=spec("batch", "length", "kv_heads", "group", "head_dim"))
            y = attention(q, k, v).reshape(
                b, t, c.num_heads, c.head_dim, out_sharding=spec("batch", "length", "heads", "head_dim")
            )
            x = x + jnp.einsum(
                "bthk,hkd->btd",
                y,
                gathered(self.o[...], "heads", "head_dim", "embed"),
                out_sharding=spec("batch", "length", "act_embed"),
            )
        with jax.named_scope("mlp"):
            return x + self.mlp(rms_norm(x, self.mlp_norm[...], c.rms_norm_eps))


class Decoder(nnx.Module):
    """Embedding, stacked layers, final norm, and a head unless it is tied to the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        v, d = config.vocab_size, config.hidden_size
        self.embed = _weight((v, d), ("vocab", "embed"), d**-0.5)
        self.layers = Layer(config)
        self.norm = _weight((d,), ("norm",), None)
        if not config.tie_embeddings:
            self.head = _weight((v, d), ("vocab", "embed"), d**-0.5)

    def lookup(self, ids: jax.Array) -> jax.Array:
        """ids [B,T] -> [B,T,D]."""
        table = gathered(self.embed[...], "vocab", "embed")
        return table.at[ids].get(out_sharding=spec("batch", "length", "act_embed"))

    def hidden(
        self, ids: jax.Array, positions: jax.Array, segment_ids: jax.Array, remat: str, unroll: int
    ) -> jax.Array:
        x = self.lookup(ids)
        cos, sin = rope_tables(self.config, positions)
        layer_def, stacked = nnx.split(self.layers)

        def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            layer = nnx.merge(layer_def, weights)
            return layer(x, cos, sin, lambda q, k, v: packed_attention(q, k, v, segment_ids)), None

        if REMAT[remat] is not None:
            body = jax.checkpoint(body, policy=REMAT[remat])
        x, _ = lax.scan(body, x, stacked, unroll=unroll)
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps)

    def decode(
        self, cache: Cache, slots: jax.Array, ids: jax.Array, positions: jax.Array, valid: jax.Array, window: int
    ) -> tuple[jax.Array, Cache]:
        x = self.lookup(ids)
        cos, sin = rope_tables(self.config, positions)
        # An index past the end is dropped by the scatter: padding never reaches the cache.
        places = jnp.where(valid, positions, cache["k"].shape[2])
        layer_def, stacked = nnx.split(self.layers)

        def body(
            carry: tuple[jax.Array, Cache], scanned: tuple[jax.Array, Any]
        ) -> tuple[tuple[jax.Array, Cache], None]:
            x, cache = carry
            index, weights = scanned
            kept: Cache = {}

            def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                for name, value in (("k", k), ("v", v)):
                    kept[name] = (
                        cache[name].at[index, slots[:, None], places].set(value.astype(cache[name].dtype), mode="drop")
                    )
                seen_k, seen_v = (kept[name][index, slots, :window].astype(q.dtype) for name in ("k", "v"))
                return cached_attention(q, seen_k, seen_v, positions)

            x = nnx.merge(layer_def, weights)(x, cos, sin, attention)
            return (x, kept), None

        (x, cache), _ = lax.scan(
            body, (x, cache), (jnp.arange(self.config.num_layers), stacked), unroll=self.config.num_layers
        )
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps), cache


@functools.lru_cache(maxsize=16)
def _abstract(config: ModelConfig) -> tuple[Any, Any]:
    """Graph definition and abstract state."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config)))


def _metadata(config: ModelConfig, name: str) -> Params:
    state = _abstract(config)[1]
    return nnx.to_pure_dict(
        jax.tree.map(lambda p: p.get_metadata(name), state, is_leaf=lambda x: isinstance(x, nnx.Param))
    )


def abstract_params(config: ModelConfig) -> Params:
    """The params' tree of ShapeDtypeStructs (float32)."""
    return nnx.to_pure_dict(_abstract(config)[1])


def param_axes(config: ModelConfig) -> Params:
    """The params' tree of logical axes, one tuple of names per weight."""
    return _metadata(config, "axes")


def init_decoder(
    config: ModelConfig, seed: int, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[Any, Params]:
    """Fresh weights from `seed`, each put on its shards where there is a mesh: (graph definition, params).

    Equal seeds give equal weights on every machine and mesh.
    """
    paths, tree = jax.tree.flatten_with_path(abstract_params(config))
    scales = jax.tree.leaves(_metadata(config, "scale"), is_leaf=lambda x: x is None)
    shardings = [None] * len(paths) if mesh is None else jax.tree.leaves(tree_shardings(mesh, param_axes(config)))
    made = []
    for (path, leaf), scale, sharding in zip(paths, scales, shardings, strict=True):
        rng = np.random.default_rng(seed_for(seed, jax.tree_util.keystr(path)))
        if scale is None:
            value = np.ones(leaf.shape, np.float32)
        else:
            value = rng.standard_normal(leaf.shape, np.float32) * np.float32(scale)
        made.append(jax.device_put(jnp.asarray(value, dtype), sharding))
    return _abstract(config)[0], jax.tree.unflatten(tree, made)


def _merge(params: Params, config: ModelConfig, dtype: Any) -> Decoder:
    graphdef, abstract = _abstract(config)
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    state = jax.tree.map(lambda x: x, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def hidden(
    params: Params,
    config: ModelConfig,
    ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    remat: str = "none",
    dtype: Any = None,
    unroll: int = 1,
) -> jax.Array:
    """Last hidden states [B,T,D] (after the final norm) of packed rows, causal within a segment.

    ids, positions, segment_ids: [B,T] int32; segment 0 is padding. `dtype` is the dtype of the computation (None: the
    weights'). ids out of range are clamped by the gather without an error: check them on the host.
    """
    return _merge(params, config, dtype).hidden(ids, positions, segment_ids, remat, unroll)


def head_weights(params: Params) -> jax.Array:
    """The output head [V,D]: its own, or the embedding where tied."""
    return params["head"] if "head" in params else params["embed"]


def init_cache(config: ModelConfig, slots: int, max_len: int, dtype: Any = jnp.float32) -> Cache:
    """An empty key-value cache: {"k","v"} of [L, slots, max_len, N, K]."""
    shape = (config.num_layers, slots, max_len, config.num_kv_heads, config.head_dim)
    return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}


def decode(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    slots: jax.Array,
    ids: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    *,
    window: int | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, Cache]:
    """Write new tokens into their slots and return their hidden states [B,T,D] with the new cache.

    One function for prefill chunks (T > 1) and decoding (T = 1). slots [B] int32: cache row of each batch row, all
    different. ids, positions [B,T] int32: token t of row b stands at positions[b,t], and sees the cache at positions
    up to its own. valid [B,T] bool: False is padding, which is not written (its output means nothing). `window`
    (static): keys beyond it are not looked at; it must exceed every valid position (None: the whole cache).
    Donate the cache to the jitted caller, so that it is updated in place.
    """
    size = cache["k"].shape[2]
    return _merge(params, config, dtype).decode(cache, slots, ids, positions, valid, min(window or size, size))
