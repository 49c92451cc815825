"""`python -m jax_train.nano --out DIR`: makes the base checkpoint of the nano policy."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import astrolabe
from jax_train.host_memory import keep_freed_memory
from jax_train.nano.base import BaseRecipe, make_base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    for field in dataclasses.fields(BaseRecipe):
        kind = float if isinstance(field.default, float) else int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = vars(parser.parse_args())
    out = given.pop("out")
    keep_freed_memory()
    knowledge = Path(astrolabe.__file__).parent / "data" / "knowledge"
    files = [knowledge / "en.jsonl", knowledge / "zh.jsonl"]
    make_base(BaseRecipe(**given), out, files, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
