"""The `astrolabe` command: verbs from the files beside this one, and one place where errors become exit codes.

Verbs import what they need when they run, so that `--help` is fast and a verb works where the packages of another are
missing. A verb returns its exit code (None: 0) or raises; data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from astrolabe.cli import demo, doctor, env, evaluate, reward, rollout, serve, status, synth, train, view
from astrolabe.records.errors import EXIT_DONE, EXIT_PARTIAL, EXIT_USAGE, AstrolabeError
from jax_train.host_memory import keep_freed_memory

app = typer.Typer(
    name="astrolabe",
    help="Turns tool documentation and questions into a trained tool agent.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(synth.app, name="synth")
app.add_typer(env.app, name="env")
app.add_typer(serve.app, name="serve")
app.add_typer(train.app, name="train")
app.command("rollout")(rollout.rollout)
app.command("reward")(reward.reward)
app.add_typer(evaluate.app, name="eval")
app.command("status")(status.status)
app.command("view")(view.view)


class _OneLine(logging.Formatter):
    """For the terminal: no traceback, which stands in the run's log."""

    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(record.getMessage().split())
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text += f": {type(error).__name__}: " + " ".join(str(error).split())[:300]
        return f"{record.levelname.lower()}: {text}"


def complain(message: str, mend: str = "") -> None:
    """One line on stderr: what is wrong, and how to mend it."""
    line = " ".join(message.split())
    if mend:
        line += ". To mend it: " + " ".join(mend.split())
    print(f"astrolabe: {line}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code (FORMATS: 0 done, 1 failed, 2 usage, 3 partial)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    handler.setLevel(logging.WARNING)
    logging.getLogger().handlers = [handler]
    keep_freed_memory()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(arguments, prog_name="astrolabe", standalone_mode=False)
        sys.stdout.flush()
    except AstrolabeError as error:
        complain(error.message, error.mend)
        return error.exit_code
    except TyperException as error:
        if text := error.format_message():  # empty where a group was called bare: its help has been printed
            context = getattr(error, "ctx", None)
            complain(text.rstrip("."), f"see `{context.command_path if context else 'astrolabe'} --help`")
        return EXIT_USAGE
    except (typer.Abort, KeyboardInterrupt):
        complain("stopped", "run the same command again to go on")
        return EXIT_PARTIAL
    except BrokenPipeError:  # the reader, such as `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    return code if isinstance(code, int) else EXIT_DONE


def run() -> None:
    """Entry point of the installed command."""
    sys.exit(main())


if __name__ == "__main__":
    run()
