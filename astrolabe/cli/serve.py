"""`astrolabe serve`: the servers that ship with the package, in the foreground until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Serve a policy or the offline teacher over HTTP.", no_args_is_help=True)
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one and prints it.")]


@app.command()
def policy(
    model: Annotated[Path, typer.Option("--model", help="Folder with config.json, safetensors and tokenizer.")],
    host: Host = "127.0.0.1",
    port: Port = 30000,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Requests decoded at once.")] = 8,
    max_len: Annotated[int, typer.Option("--max-len", min=16, help="Tokens per slot, prompt and output.")] = 2048,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the chat template open a thought.")] = False,
    name: Annotated[str | None, typer.Option("--name", help="Model name it answers to. Default: the folder's.")] = None,
) -> None:
    """The embedded JAX engine, with SGLang's endpoints."""
    from serving.engine.server import serve

    serve(model, host=host, port=port, slots=slots, max_len=max_len, enable_thinking=thinking, model_name=name)


@app.command()
def teacher(
    host: Host = "127.0.0.1",
    port: Port = 30001,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the teacher's answers.")] = 0,
    defect_rate: Annotated[
        float, typer.Option("--defect-rate", min=0.0, max=1.0, help="Share of planted defects.")
    ] = 0.08,
    labels: Annotated[Path | None, typer.Option("--labels", help="File for the labels of its defects.")] = None,
) -> None:
    """The offline teacher: deterministic programs behind an OpenAI-compatible address."""
    from agents.teacher.server import create_app
    from serving.http import serve

    serve(create_app(seed=seed, defect_rate=defect_rate, labels_path=labels), host=host, port=port, name="teacher")
