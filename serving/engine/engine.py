"""The embedded engine: continuous batching over fixed slots, in one thread that owns the device arrays.

Each turn of the loop: obey commands (swap weights, pause, flush, abort), give free slots to waiting requests, fill
caches in batched chunks, then decode a few tokens for all ready slots in one dispatch. Requests come from any thread;
results go back by a callback. Whatever fails in the loop fails every request with the reason: nobody waits for ever.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from astrolabe.model.config import ModelConfig
from astrolabe.model.decoder import Params
from astrolabe.records.errors import UsageError
from astrolabe.records.ids import seed_for
from serving.chat import ModelFailure
from serving.engine.runner import Runner
from serving.engine.slots import Request, Slot, SlotTable
from serving.render import Renderer
from serving.tokens import Generation, PauseMode, Sampling

log = logging.getLogger(__name__)


class Engine:
    """Serves one model. `model` is a Hugging Face folder, or (config, params).

    slots: requests that decode together. max_len: ids of prompt and output together, at most. steps: tokens decoded
    per dispatch. dtype: of weights and cache (None: float32 on a CPU, bfloat16 elsewhere).
    """

    def __init__(
        self,
        model: Path | str | tuple[ModelConfig, Params],
        renderer: Renderer | None = None,
        *,
        slots: int = 8,
        max_len: int = 2048,
        seed: int = 0,
        steps: int = 8,
        version: int = 0,
        dtype: Any = None,
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        if slots < 1 or max_len < 2 or steps < 1:
            raise UsageError(f"slots {slots}, max_len {max_len}, steps {steps}", "at least 1, 2 and 1 are needed")
        self.model_path = str(model) if not isinstance(model, tuple) else ""
        self._device = jax.devices()[0]
        self.dtype = dtype or (jnp.float32 if self._device.platform == "cpu" else jnp.bfloat16)
        if isinstance(model, tuple):
            self.config, params = model
        else:
            self.config = ModelConfig.from_hf(Path(model))
            params = self._load(model)
        self.renderer = renderer
        if stop_ids is None:
            stop_ids = renderer.stop_ids if renderer is not None else self.config.eos_token_ids
        self.stop_ids = frozenset(stop_ids)
        if renderer is not None and renderer.vocab_size > self.config.vocab_size:
            raise UsageError(
                f"the tokenizer has {renderer.vocab_size} ids, the model {self.config.vocab_size}",
                "use the tokenizer that belongs to the model",
            )
        self.slots, self.max_len, self.seed, self.steps = slots, max_len, seed, steps
        self.version = version
        self.counters: collections.Counter[str] = collections.Counter()
        self._table = SlotTable(slots, max_len)
        self._runner = Runner(
            self.config,
            params,
            self._table.slots,
            max_len=max_len,
            steps=steps,
            dtype=self.dtype,
            device=self._device,
        )
        self._waiting: collections.deque[Request] = collections.deque()
        self._commands: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = (
            collections.deque()
        )
        self._wake = threading.Condition()
        self._tickets = 0
        self._paused = False
        self._pause_mode: PauseMode = "retract"
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- from any thread --------------------------------------------------------------------------------------------

    def submit(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        finished: Callable[[Request | BaseException], None],
        *,
        rid: str | None = None,
        progress: Callable[[list[int]], None] | None = None,
        ignore_eos: bool = False,
    ) -> Request:
        """Queue a generation. `finished` is called once, from the engine's thread, with the request or an exception.

        `ignore_eos`: only the request's own stop ids end it. ModelFailure (bad_request) at once where the request cannot be served.
        """
        request = self._request(input_ids, sampling, finished, rid, progress)
        request.stops = frozenset(sampling.stop_token_ids) | (frozenset() if ignore_eos else self.stop_ids)
        with self._wake:
            if self._failure is not None or self._stopping:
                raise ModelFailure("server_error", f"the engine has stopped: {self._failure or 'closed'}")
            self._waiting.append(request)
            self._wake.notify()
        return request

    def abort(self, rid: str | None = None, *, ticket: int | None = None) -> None:
        """End the requests of that rid (all, where both are None) with finish reason `abort`."""

        def mark() -> None:
            for request in [*self._waiting, *(slot.request for slot in self._table.busy)]:
                if request is not None and (
                    (rid is None and ticket is None) or request.rid == rid or request.ticket == ticket
                ):
                    request.aborted = True

        self._command(mark)

    def swap(self, params: Params, version: int, *, mode: PauseMode | None = None) -> concurrent.futures.Future[None]:
        """Serve `params` as weight version `version` from the next token on. The params are copied.

        Reusable prefixes are dropped. Running requests go on: `retract` computes their cache again under the new
        weights, `in_place` keeps it, `abort` ends them (None: as the engine was paused, else `retract`).
        """
        owned = self._runner.own(params)

        def apply() -> None:
            how = mode or (self._pause_mode if self._paused else "retract")
            self._obey_mode(how)
            self._runner.params, self.version = owned, version
            self._table.drop_prefixes()
            for slot in self._table.busy:
                slot.mixed = slot.mixed or how == "in_place"
            if how == "retract":
                self._table.recompute_all()
            self.counters["swaps"] += 1

        return self._command(apply)

    def load(self, path: Path | str, version: int, *, mode: PauseMode | None = None) -> concurrent.futures.Future[None]:
        """`swap` with the weights of folder `path`. UsageError if they are not this model's."""
        future = self.swap(self._load(path), version, mode=mode)
        self.model_path = str(path)
        return future

    def pause(self, mode: PauseMode = "retract") -> concurrent.futures.Future[None]:
        """Stop generating. `abort` ends what runs; `retract` computes its cache again on `resume`; `in_place` keeps it."""

        def apply() -> None:
            self._obey_mode(mode)
            self._paused, self._pause_mode = True, mode
            if mode == "retract":
                self._table.recompute_all()

        return self._command(apply)

    def resume(self) -> concurrent.futures.Future[None]:
        def apply() -> None:
            self._paused = False

        return self._command(apply)

    def flush(self) -> concurrent.futures.Future[bool]:
        """Drop reusable prefixes; False, with nothing done, while requests run."""

        def apply() -> bool:
            if self._waiting or self._table.busy:
                return False
            self._table.drop_prefixes()
            return True

        return self._command(apply)

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def running(self) -> int:
        return len(self._table.busy)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def failure(self) -> BaseException | None:
        """What stopped the loop, if something did."""
        return self._failure

    def client(self, *, allow_truncated: bool = False) -> Any:
        """A TokenClient of this engine, in process."""
        from serving.engine.client import InProcessTokenClient

        return InProcessTokenClient(self, allow_truncated=allow_truncated)

    def close(self) -> None:
        """Stop the thread; what still runs fails with ModelFailure."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(60)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- building blocks --------------------------------------------------------------------------------------------

    def _load(self, path: Path | str) -> Params:
        from astrolabe.model.safetensors_io import load_params

        theirs = ModelConfig.from_hf(Path(path))
        if theirs != self.config:
            raise UsageError(
                f"{path} holds another model than the one that is served", "give weights of the same shape"
            )
        return load_params(path, self.config)

    def _request(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        finished: Callable[[Request | BaseException], None],
        rid: str | None,
        progress: Callable[[list[int]], None] | None,
    ) -> Request:
        if sampling.json_schema is not None:
            raise ModelFailure("bad_request", "json_schema is not supported by this engine; leave it out")
        if len(input_ids) == 0:
            raise ModelFailure("bad_request", "input_ids is empty")
        if len(input_ids) >= self.max_len:
            raise ModelFailure(
                "bad_request", f"a prompt of {len(input_ids)} ids is over the context length of {self.max_len}"
            )
        prompt = np.asarray(input_ids, np.int64)
        if prompt.ndim != 1 or prompt.min() < 0 or prompt.max() >= self.config.vocab_size:
            raise ModelFailure("bad_request", f"input_ids must be a list of ids below {self.config.vocab_size}")
        with self._wake:
            self._tickets += 1
            ticket = self._tickets
        seed = sampling.seed if sampling.seed is not None else seed_for(self.seed, "request", ticket)
        return Request(
            ticket=ticket,
            rid=rid or f"request-{ticket}",
            prompt=prompt.astype(np.int32),
            max_new=min(sampling.max_new_tokens, self.max_len - len(prompt)),
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
            top_k=sampling.top_k if sampling.temperature > 0 else -1,
            seed=seed,
            finished=finished,
            progress=progress,
        )

    def _command(self, apply: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._wake:
            if self._failure is not None or self._stopping:
                future.set_exception(
                    ModelFailure("server_error", f"the engine has stopped: {self._failure or 'closed'}")
                )
                return future
            self._commands.append((apply, future))
            self._wake.notify()
        return future

    def _obey_mode(self, mode: PauseMode) -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise ModelFailure("bad_request", f"pause mode {mode!r} is none of abort, retract, in_place")
        if mode == "abort":
            for request in [*self._waiting, *(slot.request for slot in self._table.busy)]:
                if request is not None:
                    request.aborted = True

    # -- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with jax.default_device(self._device):
                self._runner.start()
                while self._turn():
                    pass
            self._fail_all(ModelFailure("server_error", "the engine was closed"))
        except BaseException as error:  # given to every request, and kept for those to come
            log.exception("the engine stopped")
            self._failure = error
            self._fail_all(ModelFailure("server_error", f"the engine stopped: {type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        with self._wake:
            while not self._stopping and not self._commands and not self._can_work():
                self._wake.wait()
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for apply, future in commands:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(apply())
            except (ModelFailure, UsageError) as error:
                future.set_exception(error)
        self._drop_aborted()
        if not self._paused:
            self._admit()
            while filling := [slot for slot in self._table.slots if slot.filling]:
                self.counters["prefill_tokens"] += self._runner.prefill(filling)
                self.counters["prefill_calls"] += 1
                self._copy_ready()
                self._admit()
            ready = [slot for slot in self._table.slots if slot.ready]
            if ready:
                self.counters["decode_calls"] += 1
                for slot, tokens, logprobs in self._runner.decode(ready):
                    self._take(slot, tokens, logprobs)
        return True

    def _can_work(self) -> bool:
        return not self._paused and bool(self._waiting or self._table.busy)

    def _drop_aborted(self) -> None:
        for request in [r for r in self._waiting if r.aborted]:
            self._waiting.remove(request)
            self._finish(request, "abort")
        for slot in self._table.busy:
            running = slot.request
            if running is not None and running.aborted:
                self._table.release(slot)
                self._finish(running, "abort")
        self._copy_ready()

    def _admit(self) -> None:
        while self._waiting and self._table.any_free:
            slot = self._table.admit(self._waiting[0])
            self._waiting.popleft()
            self._copy_if_ready(slot)  # before the leader's slot can be given away

    def _copy_ready(self) -> None:
        for slot in self._table.slots:
            self._copy_if_ready(slot)

    def _copy_if_ready(self, slot: Slot) -> None:
        leader = slot.leader
        if leader is not None and leader.valid >= slot.shared:
            self._runner.copy(leader, slot)
            slot.valid, slot.leader = slot.shared, None
            self.counters["copied_tokens"] += slot.shared

    def _take(self, slot: Slot, tokens: list[int], logprobs: list[float]) -> None:
        """Give the sampled ids to the slot's request, and end it where it is over."""
        request = slot.request
        if request is None or not tokens:
            raise RuntimeError(f"slot {slot.index} decoded nothing")
        start = slot.target + 1
        slot.ids[start : start + len(tokens)] = tokens[: self.max_len - start]
        slot.target += len(tokens)
        slot.valid = slot.target
        request.output += tokens
        request.logprobs += logprobs
        request.versions += [self.version] * len(tokens)
        self.counters["output_tokens"] += len(tokens)
        if request.progress is not None:
            request.progress(tokens)
        if tokens[-1] in request.stops:
            self._table.release(slot)
            self._finish(request, "stop")
        elif len(request.output) >= request.max_new:
            self._table.release(slot)
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self.counters[f"finished_{reason}"] += 1
        request.finished(request)

    def _fail_all(self, error: ModelFailure) -> None:
        with self._wake:
            self._stopping = True
            requests = [*self._waiting, *(slot.request for slot in self._table.busy)]
            commands = [future for _, future in self._commands]
            self._waiting.clear()
            self._commands.clear()
        for request in requests:
            if request is not None:
                request.finished(error)
        for future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def generation(request: Request) -> Generation:
    """What a finished request gave, in the client's form."""
    return Generation(
        output_ids=list(request.output),
        logprobs=list(request.logprobs),
        finish_reason=request.finish_reason,  # type: ignore[arg-type]
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached,
        weight_version=request.versions[-1] if request.versions else 0,
        versions=tuple(request.versions),
    )
