"""The configuration of a phase: a TOML file, overridden key by key on the command line.

A file holds common sections and, under `[sft]`, `[grpo]` and `[dpo]`, what a phase adds or changes; the phase's table
is laid over the rest. Unknown keys are errors that name the closest key. Every key is read by something.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from astrolabe.records.errors import UsageError

PHASES = ("sft", "grpo", "dpo")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    path: Path
    """Hugging Face folder: config.json, weights, tokenizer. Without weights the model starts from the seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and matmuls; weights and optimizer are float32."""
    remat: Literal["none", "full", "dots"] = "none"
    unroll: int = Field(default=1, ge=1)
    """Layers per iteration of the layer scan."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at a time."""


class MeshSection(Section):
    """Devices per axis; one may be -1, the rest of the devices."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1


class DistributedSection(Section):
    enabled: bool = False
    """Call `jax.distributed.initialize`; the other keys are only needed where no cluster tells them."""
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


class OptimizerSection(Section):
    lr: float = Field(default=3e-4, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Rate at the end of the decay, as a fraction of `lr`."""
    weight_decay: float = Field(default=0.01, ge=0)
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    clip_norm: float = Field(default=1.0, ge=0)
    """0: no clipping."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"


class BatchSection(Section):
    rows: int = Field(default=8, ge=1)
    budget: int = Field(default=1024, ge=2)
    """Tokens in a row; the longest sample must fit."""
    micro_batches: int = Field(default=1, ge=1)
    """Micro-batches of one optimizer step (GRPO: the most that there may be)."""


class CheckpointSection(Section):
    every: int = Field(default=50, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)


class TrainConfig(Section):
    model: ModelSection
    out: Path
    """The run's folder; the same command continues it. The trained model goes to `out/model`."""
    seed: int = 0
    mesh: MeshSection = MeshSection()
    distributed: DistributedSection = DistributedSection()
    optimizer: OptimizerSection = OptimizerSection()
    batch: BatchSection = BatchSection()
    checkpoint: CheckpointSection = CheckpointSection()


class SftData(Section):
    train: list[Path] = Field(min_length=1)
    """Trajectory files (JSONL), or run folders that hold trajectories.jsonl or rollouts.jsonl."""
    validation: list[Path] = []
    min_score: float | None = None
    """Trajectories whose judges' score is lower (or missing) are left out."""
    min_reward: float | None = None
    """Rollouts whose reward is lower are left out: rejection sampling. Trajectories without a reward are not concerned."""
    enable_thinking: bool = False


class SftConfig(TrainConfig):
    data: SftData
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; None: by `epochs`."""
    epochs: float = Field(default=1.0, gt=0)
    eval_every: int = Field(default=50, ge=1)
    """Steps between validations; the last step is always validated."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many validations without a better one; None: never. The best weights are the ones exported."""
    min_gain: float = Field(default=0.0, ge=0)
    """A validation loss is better only if lower by more than this."""


class DpoLossSection(Section):
    beta: float = Field(default=0.1, gt=0)
    length_normalise: bool = False
    sft_weight: float = Field(default=0.0, ge=0)


class DpoData(Section):
    preferences: Path
    """Run folder with preferences.jsonl and the token store that its traces point into."""
    reference: Path | None = None
    """The reference model's folder; None: the model that training starts from."""


class DpoConfig(TrainConfig):
    data: DpoData
    loss: DpoLossSection = DpoLossSection()
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; None: by `epochs`."""
    epochs: float = Field(default=1.0, gt=0)


class GrpoLossSection(Section):
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    normaliser: Literal["token", "sequence", "constant"] = "token"
    constant_length: int = Field(default=1024, ge=1)
    ratio: Literal["token", "sequence"] = "token"
    correction: Literal["none", "tis"] = "tis"
    tis_cap: float = Field(default=2.0, gt=0)
    max_mismatch: float | None = None
    kl_beta: float = Field(default=0.0, ge=0)
    """Above 0 a reference model (the one that training starts from) is kept."""


class GrpoFillerSection(Section):
    target: int = Field(default=8, ge=1)
    """Groups in a batch."""
    key: Literal["reward", "accuracy"] = "reward"
    threshold: float = Field(default=1e-6, ge=0)
    max_staleness: int = Field(default=1, ge=0)
    budget: float = Field(default=10.0, ge=1)


class GrpoRolloutSection(Section):
    n: int = Field(default=8, ge=2)
    """Episodes in a group."""
    max_turns: int = 8
    max_calls: int = 16
    max_tokens: int = 2048
    wall_s: float = 300.0
    reward: Literal["f1", "answer"] = "f1"
    attempts: int = Field(default=3, ge=1)
    system: str | None = None
    max_in_flight: int = Field(default=8, ge=1)
    """Groups sampled at a time."""


class GrpoEngineSection(Section):
    slots: int = Field(default=16, ge=1)
    max_len: int = Field(default=2048, ge=2)
    base_url: str | None = None
    """An SGLang server instead of the embedded engine."""


class GrpoConfig(TrainConfig):
    environments: list[Path] = Field(min_length=1)
    """Environment files (JSONL) or run folders that hold environments.jsonl."""
    steps: int = Field(ge=1)
    loss: GrpoLossSection = GrpoLossSection()
    filler: GrpoFillerSection = GrpoFillerSection()
    rollout: GrpoRolloutSection = GrpoRolloutSection()
    engine: GrpoEngineSection = GrpoEngineSection()
    mismatch_warn: float = 1e-3
    mismatch_stop: float = 1e-1
    """Nats per token between engine and trainer at which the run warns, and ends."""
    normalise_std: bool = True
    leave_one_out: bool = False
    synchronous: bool = True
    store_rollouts: bool = True


CONFIGS: dict[str, type[TrainConfig]] = {"sft": SftConfig, "grpo": GrpoConfig, "dpo": DpoConfig}
T = TypeVar("T", bound=TrainConfig)


def load_config(phase: str, file: Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """The phase's configuration from `file` (TOML) and `overrides` (`--key.sub`, `value`, ...).

    Values on the command line are TOML where they parse (`3`, `true`, `["a"]`), else text; one value for a list is a
    list of one. UsageError for an unknown phase, file, key or a value of the wrong kind.
    """
    if phase not in CONFIGS:
        raise UsageError(f"no phase {phase!r}", f"one of {', '.join(PHASES)}")
    tree = _read(file) if file is not None else {}
    tables = {name: tree.pop(name) for name in PHASES if name in tree}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise _no_table(name, table, str(file))
        _check_keys(_merge(tree, table), CONFIGS[name], f"{file} [{name}]")
    merged = _merge(tree, tables.get(phase, {}))
    _check_keys(merged, CONFIGS[phase], str(file))
    for key, value in _pairs(overrides):
        _set(merged, key, value, CONFIGS[phase])
    try:
        return CONFIGS[phase].model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{phase}: {key}: {first['msg']}", f"set {key} in {file or 'a --config file'} or by --{key}"
        ) from None


def dump_config(config: TrainConfig) -> str:
    """The resolved configuration as JSON, as `--dry-run` prints it."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file", "give --config a TOML file, such as configs/demo.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not TOML: {error}", "mend the file") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", "give --config a TOML file that can be read") from None


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        out[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out


def _keys(kind: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a config class, sections too, with its type."""
    out: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        out[prefix + name] = field.annotation
        if _is_section(field.annotation):
            out |= _keys(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
    return out


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _no_table(key: str, value: Any, where: str) -> UsageError:
    return UsageError(f"{where}: `{key}` must be a table, not {value!r}", f"write [{key}] and its keys below it")


def _unknown(key: str, kind: type[BaseModel], where: str) -> UsageError:
    close = difflib.get_close_matches(key, _keys(kind), n=1, cutoff=0.0)
    return UsageError(f"{where}: unknown key {key!r}", f"the closest key is {close[0]!r}" if close else "")


def _check_keys(tree: dict[str, Any], kind: type[BaseModel], where: str, prefix: str = "") -> None:
    known = _keys(kind)
    for name, value in tree.items():
        key = prefix + name
        if key not in known:
            raise _unknown(key, kind, where)
        if _is_section(known[key]):
            if not isinstance(value, dict):
                raise _no_table(key, value, where)
            _check_keys(value, kind, where, f"{key}.")


def _pairs(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    rest = list(overrides)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise UsageError(f"unexpected argument {flag!r}", "overrides are written --key.sub value")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest:
                raise UsageError(f"--{key} has no value", f"write --{key} VALUE")
            value = rest.pop(0)
        pairs.append((key, _value(value)))
    return pairs


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(tree: dict[str, Any], key: str, value: Any, kind: type[BaseModel]) -> None:
    known = _keys(kind)
    key = key.replace("-", "_")
    if key not in known:
        raise _unknown(key, kind, "command line")
    if _is_section(known[key]):
        raise UsageError(
            f"--{key} is a section",
            f"set one of its keys, such as --{next(k for k in known if k.startswith(key + '.'))}",
        )
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = [value] if get_origin(known[key]) is list and not isinstance(value, list) else value
