"""`astrolabe train`: the same as `python jax_train/launch.py`, whose arguments it passes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train a policy. Keys of the configuration follow as --key.sub value.", no_args_is_help=True)
PASS = {"allow_extra_args": True, "ignore_unknown_options": True}
Config = Annotated[Path | None, typer.Option("--config", help="TOML file of the phase, such as configs/demo.toml.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Resolve and print the configuration, then stop.")]


def _launch(phase: str, config: Path | None, dry_run: bool, rest: list[str]) -> int:
    from jax_train.launch import main

    for name in ("jax_train", "serving"):  # how training goes is what one wants to see
        logging.getLogger(name).setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.INFO)
    flags = ["--config", str(config)] if config is not None else []
    return main([phase, *flags, *(["--dry-run"] if dry_run else []), *rest])


@app.command(context_settings=PASS)
def sft(context: typer.Context, config: Config = None, dry_run: DryRun = False) -> int:
    """Supervised fine-tuning on trajectories."""
    return _launch("sft", config, dry_run, context.args)


@app.command(context_settings=PASS)
def grpo(context: typer.Context, config: Config = None, dry_run: DryRun = False) -> int:
    """Group-relative policy optimisation in environments."""
    return _launch("grpo", config, dry_run, context.args)


@app.command(context_settings=PASS)
def dpo(context: typer.Context, config: Config = None, dry_run: DryRun = False) -> int:
    """Direct preference optimisation on the policy's own pairs."""
    return _launch("dpo", config, dry_run, context.args)
