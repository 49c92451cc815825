"""New weights into the servers that sample, between tokens and not between episodes.

Two ways behind one call: the embedded engine takes the trainer's arrays in process; any server that speaks SGLang's
protocol loads a folder (pause -> update -> continue). Every token carries the version that sampled it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from serving.tokens import PauseMode, TokenClient

if TYPE_CHECKING:
    from serving.engine.engine import Engine


class WeightSync(Protocol):
    async def push(self, params: Any, version: int) -> None:
        """Sample with `params` (the trainer's pytree) from now on, as weight version `version`."""
        ...


class InProcessSync:
    """Into the embedded engine, which copies them: the trainer donates its own to the next step. Requests that run go on
    under the new weights, their cache computed again."""

    def __init__(self, engine: Engine, *, mode: PauseMode = "retract") -> None:
        self._engine = engine
        self._mode: PauseMode = mode

    async def push(self, params: Any, version: int) -> None:
        await asyncio.wrap_future(self._engine.swap(params, version, mode=self._mode))


class DiskSync:
    """Through a folder of safetensors that the server can see, `folder/version-N`; the last `keep` stay."""

    def __init__(
        self,
        client: TokenClient,
        folder: Path,
        save: Callable[[Any, Path], None],
        *,
        mode: PauseMode = "retract",
        keep: int = 2,
    ) -> None:
        """`save(params, folder)` writes the weights in the form that the server loads."""
        self._client, self._folder, self._save = client, folder, save
        self._mode: PauseMode = mode
        self._keep = keep

    async def push(self, params: Any, version: int) -> None:
        """ModelFailure if the server does not take them; it then goes on with the old ones."""
        target = self._folder / f"version-{version}"
        partial = self._folder / "writing"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        partial.mkdir(parents=True)
        await asyncio.to_thread(self._save, params, partial)
        partial.rename(target)
        await self._client.pause(self._mode)
        try:
            await self._client.update_weights_from_disk(str(target), version)
        finally:
            await self._client.continue_()
        kept = sorted(self._folder.glob("version-*"), key=lambda path: int(path.name.removeprefix("version-")))
        for old in kept[: -self._keep]:
            shutil.rmtree(old)
