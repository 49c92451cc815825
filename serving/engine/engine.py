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
from serving.engine.device import SlotCache, copy_prefix, decode_chunk, empty_cache, grow_cache, prefill
from serving.engine.slots import Request, Slot, SlotTable
from serving.render import Renderer
from serving.tokens import Generation, PauseMode, Sampling

log = logging.getLogger(__name__)

CHUNK_SHAPES = ((8, 32), (4, 128))
"""Prefill calls: (rows, ids per row), shortest first."""
FIRST_LENGTH = 512
"""The cache starts with room for this many positions per slot and doubles when a request needs more."""
STOPS = 8


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
        self._params = self._own(params)
        self._table = SlotTable(slots, max_len)
        self._cache: SlotCache = ()
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
        owned = self._own(params)

        def apply() -> None:
            how = mode or (self._pause_mode if self._paused else "retract")
            self._obey_mode(how)
            self._params, self.version = owned, version
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

    def _own(self, params: Params) -> Params:
        """Our copy on our device, whole: the trainer donates its own buffers at its next step.

        The sharding is named, not the device: given a device, JAX keeps a trainer's mesh axes in the array's type.
        """
        whole = jax.sharding.SingleDeviceSharding(self._device)
        return jax.tree.map(
            lambda x: jax.device_put(x if x.dtype == self.dtype else x.astype(self.dtype), whole, may_alias=False),
            params,
        )

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
                # Made here, and not by the caller, who may have set a mesh: that is a matter of the thread.
                self._cache = empty_cache(self.config, self.slots, min(FIRST_LENGTH, self.max_len), self.dtype)
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
            while any(slot.filling for slot in self._table.slots):
                self._prefill()
                self._copy_ready()
                self._admit()
            self._decode()
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
            self._cache = copy_prefix(self._cache, np.int32(leader.index), np.int32(slot.index))
            slot.valid, slot.leader = slot.shared, None
            self.counters["copied_tokens"] += slot.shared

    def _prefill(self) -> None:
        """One call: the rows with the most left, in the shortest chunk that fits them all, else the longest."""
        filling = sorted((s for s in self._table.slots if s.filling), key=lambda s: s.valid - s.target)
        most = filling[0].target - filling[0].valid
        rows, width = next((shape for shape in CHUNK_SHAPES if most <= shape[1]), CHUNK_SHAPES[-1])
        rows = min(rows, self.slots)
        chosen = filling[:rows]
        table = np.zeros((rows, 3), np.int32)
        ids = np.zeros((rows, width), np.int32)
        taken = {slot.index for slot in chosen}
        idle = iter(index for index in range(self.slots) if index not in taken)
        for row in range(rows):
            if row < len(chosen):
                slot = chosen[row]
                count = min(width, slot.target - slot.valid)
                table[row] = slot.index, slot.valid, count
                ids[row, :count] = slot.ids[slot.valid : slot.valid + count]
            else:
                table[row, 0] = next(idle)
        self._ensure_length(int((table[:, 1] + table[:, 2]).max()))
        self._cache = prefill(self._params, self._cache, table, ids, config=self.config)
        for row, slot in enumerate(chosen):
            slot.valid += int(table[row, 2])
        self.counters["prefill_tokens"] += int(table[:, 2].sum())
        self.counters["prefill_calls"] += 1

    def _decode(self) -> None:
        ready = [slot for slot in self._table.slots if slot.ready]
        if not ready:
            return
        steps = self.steps
        few = self.slots // 4
        rows = few if few >= 2 and len(ready) <= few else self.slots
        if rows == self.slots:
            members: list[Slot | None] = [slot if slot.ready else None for slot in self._table.slots]
            indices = list(range(self.slots))
        else:
            used = {slot.index for slot in ready}
            spare = [index for index in range(self.slots) if index not in used][: rows - len(ready)]
            members = [*ready, *([None] * len(spare))]
            indices = [*(slot.index for slot in ready), *spare]
        width = max(STOPS, _power_of_two(max(len(slot.request.stops) or 1 for slot in ready if slot.request)))
        ints = np.zeros((rows, 6), np.int32)
        floats = np.ones((rows, 2), np.float32)
        stops = np.full((rows, width), -1, np.int32)
        seeds = np.zeros(rows, np.uint64)
        ints[:, 0] = indices
        for row, slot in enumerate(members):
            request = slot.request if slot is not None else None
            if slot is None or request is None:
                continue
            left = request.max_new - len(request.output)
            ints[row] = slot.index, slot.ids[slot.target], slot.target, left, request.top_k, 1
            floats[row] = request.temperature, request.top_p
            stops[row, : len(request.stops)] = sorted(request.stops)
            seeds[row] = request.seed % 2**63
        self._ensure_length(max(slot.target + min(steps, int(ints[:, 3].max())) for slot in ready))
        truncated = any(slot.request and (slot.request.top_p < 1 or slot.request.top_k > 0) for slot in ready)
        self._cache, chunk = decode_chunk(
            self._params,
            self._cache,
            ints,
            floats,
            stops,
            uniform_numbers(seeds, ints[:, 2], steps),
            config=self.config,
            all_slots=rows == self.slots,
            truncated=truncated,
        )
        tokens, logprobs, counts = (np.asarray(part) for part in chunk)
        self.counters["decode_calls"] += 1
        for row, slot in enumerate(members):
            if slot is not None:
                self._take(slot, tokens[row, : counts[row]].tolist(), logprobs[row, : counts[row]].tolist())

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

    def _ensure_length(self, needed: int) -> None:
        length = self._cache[0][0].shape[2]
        while length < min(needed, self.max_len):
            length = min(2 * length, self.max_len)
        if length > self._cache[0][0].shape[2]:
            self._cache = grow_cache(self._cache, length=length)


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


def uniform_numbers(seeds: np.ndarray, positions: np.ndarray, steps: int) -> np.ndarray:
    """[B, steps] float32 in [0, 1): a hash (SplitMix64) of each row's seed [B] and the positions that follow [B]."""
    with np.errstate(over="ignore"):
        at = (positions.astype(np.uint64)[:, None] + np.arange(1, steps + 1, dtype=np.uint64)[None]) & np.uint64(
            2**32 - 1
        )
        value = _mix(_mix(seeds[:, None]) + at * np.uint64(0x9E3779B97F4A7C15))
    return ((value >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
