"""The shape of a decoder, read from and written to Hugging Face's `config.json`.

One frozen, hashable dataclass, so that it can be a static argument of a jitted function. Everything that changes the
mathematics (RoPE base and scaling, epsilon, head sizes, tying) comes from the file: nothing has a default that could
silently differ from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astrolabe.records.errors import UsageError
from astrolabe.records.jsonl import read_object

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Qwen3, Qwen2 or Llama decoder. Sizes are counts, `rope_theta` is the RoPE base."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    max_position: int
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    """RMS norm over each head's query and key (Qwen3)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.num_heads} attention heads do not divide into {self.num_kv_heads} key-value heads",
                "make num_attention_heads a multiple of num_key_value_heads in config.json",
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim {self.head_dim} is odd", "rotary embedding needs an even head_dim")

    @property
    def num_params(self) -> int:
        """Number of weights, the head counted once where it is tied."""
        d, heads, kv, k = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim
        layer = 2 * d * heads * k + 2 * d * kv * k + 3 * d * self.intermediate_size + 2 * d
        layer += (2 * k if self.qk_norm else 0) + ((heads + 2 * kv) * k if self.qkv_bias else 0)
        return self.num_layers * layer + d + self.vocab_size * d * (1 if self.tie_embeddings else 2)

    @classmethod
    def from_hf(cls, source: Path | str | dict[str, Any]) -> ModelConfig:
        """From a model folder, a `config.json`, or its parsed content. Raises UsageError on what the decoder cannot do."""
        if isinstance(source, dict):
            row, where = source, "config.json"
        else:
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            if not path.is_file():
                raise UsageError(f"no config.json at {path}", "give a Hugging Face model folder")
            row, where = read_object(path, "take the config.json that came with the model"), str(path)
        try:
            return cls._from_row(row)
        except KeyError as error:
            raise UsageError(
                f"{where} lacks {error.args[0]!r}", "take the config.json that came with the model"
            ) from error

    @classmethod
    def _from_row(cls, row: dict[str, Any]) -> ModelConfig:
        kind = row["model_type"]
        if kind not in _ARCHITECTURES:
            raise UsageError(f"model_type {kind!r} is not supported", f"use one of {', '.join(sorted(_ARCHITECTURES))}")
        for key, only in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
            if row.get(key, only) != only:
                raise UsageError(f"{key}={row[key]!r} is not supported", f"only {key}={only!r} is")
        if row.get("attention_bias", False) and kind != "qwen2":
            raise UsageError("attention_bias is not supported for this model_type", "use a model without it")
        rope = {**(row.get("rope_scaling") or {}), **(row.get("rope_parameters") or {})}
        eos = row.get("eos_token_id")
        return cls(
            model_type=kind,
            vocab_size=row["vocab_size"],
            hidden_size=row["hidden_size"],
            intermediate_size=row["intermediate_size"],
            num_layers=row["num_hidden_layers"],
            num_heads=row["num_attention_heads"],
            num_kv_heads=row.get("num_key_value_heads") or row["num_attention_heads"],
            head_dim=row.get("head_dim") or row["hidden_size"] // row["num_attention_heads"],
            rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else row["rope_theta"]),
            rms_norm_eps=row["rms_norm_eps"],
            tie_embeddings=row.get("tie_word_embeddings", False),
            max_position=row["max_position_embeddings"],
            rope_scaling=_rope_scaling(rope),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
            bos_token_id=row.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=row.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers and SGLang read; `from_hf(to_hf())` is the same config."""
        scaling = self.rope_scaling
        row: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids)
            if len(self.eos_token_ids) > 1
            else next(iter(self.eos_token_ids), None),
            "pad_token_id": self.pad_token_id,
        }
        if scaling is not None:
            row["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
        if self.model_type == "qwen2":
            del row["attention_bias"]
        return row


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UsageError(f"rope scaling {kind!r} is not supported", "use a model with plain or llama3 RoPE")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=rope["original_max_position_embeddings"],
    )
