"""The entry of training: `python jax_train/launch.py sft|grpo|dpo --config F [--key.sub value] [--dry-run]`.

`astrolabe train` calls the same `main`. On one machine nothing is initialised; with `distributed.enabled` every host
runs the same command.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the checkout's root is where the packages are
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from astrolabe.records.errors import EXIT_DONE, EXIT_PARTIAL, EXIT_USAGE, AstrolabeError, UsageError
from jax_train.config import PHASES, DistributedSection, dump_config, load_config
from jax_train.host_memory import keep_freed_memory

USAGE = f"usage: launch.py {'|'.join(PHASES)} --config FILE [--key.sub value ...] [--dry-run]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a phase; prints its summary as JSON on stdout. Returns the exit code; raises AstrolabeError for what a user
    can mend."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        print(USAGE, file=sys.stderr)
        return EXIT_USAGE
    if not {"-h", "--help"}.isdisjoint(args):
        print(USAGE)
        return EXIT_DONE
    phase, file, dry_run, overrides = _parse(args)
    config = load_config(phase, file, overrides)
    if dry_run:
        print(dump_config(config))
        return EXIT_DONE
    _initialize(config.distributed)
    summary = importlib.import_module(f"jax_train.phases.{phase}").run(config)
    print(json.dumps(summary, ensure_ascii=False))
    return EXIT_DONE


def _parse(args: list[str]) -> tuple[str, Path | None, bool, list[str]]:
    phase, *rest = args
    if phase not in PHASES:
        raise UsageError(f"no phase {phase!r}", USAGE)
    file: Path | None = None
    dry_run = False
    overrides: list[str] = []
    while rest:
        flag = rest.pop(0)
        if flag == "--dry-run":
            dry_run = True
        elif flag == "--config" or flag.startswith("--config="):
            value = flag.partition("=")[2] or (rest.pop(0) if rest else "")
            if not value:
                raise UsageError("--config has no value", USAGE)
            file = Path(value)
        else:
            overrides.append(flag)
    return phase, file, dry_run, overrides


def _initialize(section: DistributedSection) -> None:
    if not section.enabled:
        return
    import jax

    jax.distributed.initialize(section.coordinator, section.num_processes, section.process_id)


def script() -> int:
    """`main` as a program: an error that can be mended is one line, without a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of each backend that is not there
    keep_freed_memory()
    try:
        return main()
    except AstrolabeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: stopped (run the same command again to go on)", file=sys.stderr)
        return EXIT_PARTIAL


if __name__ == "__main__":
    sys.exit(script())
