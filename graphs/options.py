"""The options of a synthesis run, as the command and its configuration file give them.

A value is taken from the flag, else from the TOML file of `--config`, else from the default here. What decides the
records (seed, models, limits) is written into `run.json`; what only decides how they are made (concurrency, paths,
addresses) is not, so that equal runs have equal files.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from astrolabe.records.errors import UsageError
from serving.http import is_loopback

ROLES = ("planner", "emulator", "decomposer", "verifier", "judge", "policy")
RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("at least 0", lambda x: x >= 0),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "max_tokens": ("at least 1", lambda x: x >= 1),
    "timeout_s": ("above 0", lambda x: x > 0),
    "limit": ("at least 1", lambda x: x >= 1),
    "concurrency": ("at least 1", lambda x: x >= 1),
    "min_tools": ("at least 1", lambda x: x >= 1),
    "defect_rate": ("from 0 to 1", lambda x: 0 <= x <= 1),
}
"""What a number may be, of the run and of a role; none may be infinite or NaN."""


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """The model of one role. A field that is None is that of the run."""

    model_url: str | None = None
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    timeout_s: float | None = None
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; the key itself is never stored."""


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """How one data set is synthesised. `graphs/session.py` makes of it the run store, the clients and the teacher."""

    model_url: str | None = None
    """Base address of an OpenAI-compatible server; None starts the offline teacher in this process."""
    model: str = "default"
    temperature: float = 0.7
    top_p: float = 1.0
    max_tokens: int = 2048
    timeout_s: float = 120.0
    api_key_env: str | None = None
    roles: Mapping[str, RoleModel] = field(default_factory=dict)
    """Overrides per role, by a name of `ROLES`."""
    allow_self_judge: bool = False
    """Lets the judge be the model that wrote what it judges, where the configuration names both."""
    limit: int | None = None
    """At most this many input items (of the shard)."""
    seed: int = 0
    concurrency: int = 16
    config: Path | None = None
    replay: Path | None = None
    """A run whose stored replies answer every request; no server is asked."""
    shard: tuple[int, int] | None = None
    """(i, n), i from 0: every n-th input item, beginning with the i-th."""
    min_tools: int = 3
    defect_rate: float = 0.08
    """Share of the offline teacher's answers that carry a planted defect."""
    labels: Path | None = None
    """Where the offline teacher writes the labels of its planted defects."""

    def recorded(self) -> dict[str, Any]:
        """The part that decides the records: no address, no path of this machine, no degree of concurrency."""
        out: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "limit": self.limit,
            "shard": f"{self.shard[0]}/{self.shard[1]}" if self.shard else None,
            "min_tools": self.min_tools,
            "defect_rate": self.defect_rate if self.model == "astrolabe-teacher" and self.model_url is None else None,
            "allow_self_judge": self.allow_self_judge,
            "roles": {
                role: {
                    f.name: getattr(spec, f.name) for f in fields(spec) if f.name not in ("model_url", "api_key_env")
                }
                for role, spec in sorted(self.roles.items())
            },
        }
        return out

    def select(self, items: list[Any]) -> list[Any]:
        """The items of this shard, up to the limit, in input order."""
        if self.shard:
            items = items[self.shard[0] :: self.shard[1]]
        return items if self.limit is None else items[: self.limit]


def parse_shard(text: str) -> tuple[int, int]:
    """`"0/4"` -> (0, 4). UsageError unless 0 <= i < n."""
    left, _, right = text.partition("/")
    if not (left.isdecimal() and right.isdecimal() and 0 <= int(left) < int(right)):
        raise UsageError(f"--shard {text}: not a shard", "give i/n with 0 <= i < n, such as 0/4")
    return int(left), int(right)


def _typed(cls: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {f.name: str(f.type) for f in fields(cls)}
    out: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key `{key}`", f"the keys are {', '.join(sorted(known))}")
        kind = known[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = (
            (kind.startswith("bool") and isinstance(value, bool))
            or (kind.startswith("int") and number and isinstance(value, int))
            or (kind.startswith("float") and number)
            or (kind.startswith(("str", "Path")) and isinstance(value, str))
            or (kind.startswith("tuple") and isinstance(value, str))
        )
        if not fits:
            raise UsageError(f"{where}: `{key}` must be {kind.split(' |')[0]}, not {value!r}", "correct the value")
        out[key] = Path(value) if kind.startswith("Path") else parse_shard(value) if kind.startswith("tuple") else value
    return out


def load_options(config: Path | None, flags: Mapping[str, Any]) -> SynthOptions:
    """The options of the TOML file `config`, overridden by every flag that is not None.

    UsageError names a file that is missing or no TOML, an unknown key or role, a value of the wrong type or out of its
    range, and a judge that would judge its own generations without `allow_self_judge`.
    """
    options = SynthOptions()
    if config is not None:
        try:
            table = tomllib.loads(config.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{config}: {error.strerror}", "give the path of a TOML file to --config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{config}: not TOML: {error}", "correct the file") from None
        roles = table.pop("roles", {})
        if not isinstance(roles, dict) or not all(isinstance(spec, dict) for spec in roles.values()):
            raise UsageError(f"{config}: `roles` must be tables", "write [roles.judge] and its keys below it")
        for role in roles:
            if role not in ROLES:
                close = difflib.get_close_matches(role, ROLES, n=1, cutoff=0.0)[0]
                raise UsageError(
                    f"{config}: no role {role!r} in [roles.{role}]", f"the closest is {close!r}, of {', '.join(ROLES)}"
                )
        options = replace(
            options,
            **_typed(SynthOptions, table, str(config)),
            roles={
                role: RoleModel(**_typed(RoleModel, spec, f"{config} [roles.{role}]")) for role, spec in roles.items()
            },
        )
    options = replace(options, config=config, **{key: value for key, value in flags.items() if value is not None})
    _check_ranges(options, "")
    for role, spec in options.roles.items():
        _check_ranges(spec, f"[roles.{role}] ")
    check_judge(options)
    return options


def _check_ranges(options: SynthOptions | RoleModel, where: str) -> None:
    for key, (wanted, fits) in RANGES.items():
        value = getattr(options, key, None)
        if value is not None and not (-math.inf < value < math.inf and fits(value)):
            raise UsageError(f"{where}`{key}` is {value}", f"it must be {wanted}")


def _who(options: SynthOptions, role: str) -> tuple[str | None, str]:
    """(server, model) of a role; no server is the offline teacher."""
    spec = options.roles.get(role, RoleModel())
    url = spec.model_url or options.model_url
    return None if url is None else _server(url), spec.model or options.model


def _server(url: str) -> str:
    """One form for all spellings of a server's address. UsageError if it is none."""
    try:
        parts = urlsplit(url)
        host = "localhost" if is_loopback(url) else parts.hostname
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise UsageError(f"model_url {url}: {error}", "give an address such as http://127.0.0.1:30000/v1") from None
    return f"{host}:{port}{parts.path.rstrip('/').removesuffix('/v1')}"


def self_judged(options: SynthOptions) -> bool:
    """Whether the judge is the very model that writes the trajectories."""
    return _who(options, "judge") == _who(options, "policy")


def check_judge(options: SynthOptions) -> None:
    """UsageError where the judge is the policy in a configuration that names models per role, which must say so; one
    model for everything has been said by naming one model. Certain once the servers' own names for `default` are in
    `options`."""
    (server, _), judged = _who(options, "judge"), self_judged(options)
    if judged and server is not None and options.roles and not options.allow_self_judge:
        raise UsageError(
            "the judge would judge its own generations: [roles.judge] and [roles.policy] are the same model",
            "give the judge another model, or set allow_self_judge = true",
        )
