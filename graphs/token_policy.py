"""The token policy of the solver: acts through a token server with a renderer, and records the episode as tokens.

The prompt is rendered once; sampled ids are kept as they came, and what the tools said is appended as the template's
suffix, so that the row that is trained is the row that was sampled. Nothing is decoded and encoded again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from astrolabe.records.base import Usage
from astrolabe.records.ids import content_hash, seed_for
from astrolabe.records.messages import FunctionCall, Message, ToolCall
from astrolabe.records.trajectory import Segment
from graphs.solver import Episode, PolicyFailure, Turn
from serving.chat import ModelFailure
from serving.render import BridgeError, ParsedCall, ParsedTurn, Renderer
from serving.tokens import Generation, Sampling, TokenClient


@dataclass
class Branch:
    """One row of tokens as the sampler saw it. All lists have one entry per token."""

    parent: int | None = None
    """Index of the branch that this one forked from."""
    fork: int | None = None
    """Tokens shared with the parent."""
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 exactly on the ids that the policy sampled in this branch."""
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled ids, as the engine gave them; NaN where mask is 0."""
    versions: list[int] = field(default_factory=list)
    """Weight version that sampled the id; -1 where mask is 0."""
    segments: list[Segment] = field(default_factory=list)

    def append(self, ids: Sequence[int], author: str, turn: int) -> None:
        """Tokens that nobody sampled."""
        self._extend(ids, [0] * len(ids), [math.nan] * len(ids), [-1] * len(ids), author, turn)

    def append_sampled(self, generation: Generation, turn: int) -> None:
        ids = generation.output_ids
        if len(generation.logprobs) != len(ids):
            raise PolicyFailure("bad_reply", f"{len(ids)} ids with {len(generation.logprobs)} log-probs")
        versions = list(generation.versions) or [generation.weight_version] * len(ids)
        self._extend(ids, [1] * len(ids), generation.logprobs, versions, "policy", turn)

    def _extend(
        self,
        ids: Sequence[int],
        mask: list[int],
        logprobs: list[float],
        versions: list[int],
        author: str,
        turn: int,
    ) -> None:
        if not ids:
            return
        start = len(self.tokens)
        self.tokens += ids
        self.mask += mask
        self.logprobs += logprobs
        self.versions += versions
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.author, last.turn) == (author, turn):
            self.segments[-1] = last.model_copy(update={"end": len(self.tokens)})
        else:
            self.segments.append(
                Segment.model_validate({"start": start, "end": len(self.tokens), "author": author, "turn": turn})
            )


@dataclass
class Tape:
    """An episode as tokens: branches, of which the last is live.

    A history that the template can extend grows the live branch. One that it cannot (somebody edited a turn, the
    template strips old reasoning) is rendered anew as a fork: the shared prefix is context there, mask 0, since its
    sampled tokens are trained in the branch that sampled them, once."""

    branches: list[Branch] = field(default_factory=list)
    history: list[Message] = field(default_factory=list)
    """The messages that the live branch stands for."""
    prompt_length: int = 0
    """Tokens of the live branch before its last sampled turn."""

    @property
    def live(self) -> Branch:
        return self.branches[-1]


class TokenPolicy:
    """Acts through `/generate` with ids in, and records the episode on a `Tape`.

    `max_new_tokens` bounds one turn. Log-probs come from the client; sampling is untruncated unless the client was
    made to allow it."""

    def __init__(
        self,
        client: TokenClient,
        renderer: Renderer,
        *,
        sampling: Sampling | None = None,
        model: str = "policy",
    ) -> None:
        self._client, self._renderer, self._model = client, renderer, model
        self._sampling = sampling or Sampling()

    async def act(self, episode: Episode) -> Turn:
        tape = episode.tape if episode.tape is not None else Tape()
        self._catch_up(tape, episode)
        branch = tape.live
        room = episode.tokens_left
        if episode.budgets.max_context is not None:
            room = min(room, episode.budgets.max_context - len(branch.tokens))
        if room <= 0:
            return Turn(message=Message(role="assistant"), finish="context", tape=tape)
        generation = await self._generate(branch.tokens, min(room, self._sampling.max_new_tokens), episode)
        if generation is None:
            return Turn(message=Message(role="assistant"), finish="context", tape=tape)
        tape.prompt_length = len(branch.tokens)
        parsed = self._renderer.parse(generation.output_ids, branch.tokens)
        branch.append_sampled(generation, episode.turn)
        message = _message(parsed)
        tape.history = [*episode.messages, message]
        return Turn(
            message=message,
            finish="length" if generation.finish_reason == "length" else "stop",
            usage=Usage(prompt_tokens=tape.prompt_length, completion_tokens=len(generation.output_ids), calls=1),
            model=self._model,
            tape=tape,
        )

    def _catch_up(self, tape: Tape, episode: Episode) -> None:
        """Bring the live branch to the point where the policy is to speak: a suffix where it can be, else a fork."""
        seen = len(tape.history)
        if tape.branches and _same(tape.history, episode.messages[:seen]):
            branch = tape.live
            new = episode.messages[seen:]
            try:
                suffix = self._renderer.bridge(
                    branch.tokens[: tape.prompt_length], branch.tokens[tape.prompt_length :], new, episode.tools
                )
            except BridgeError:
                pass  # this template cannot append here: fork below
            else:
                at = 0
                for author, count in suffix.segments:
                    branch.append(suffix.ids[at : at + count], author, episode.turn)
                    at += count
                return
        _rebase(tape, self._renderer.prompt_ids(episode.messages, episode.tools), episode.turn)

    async def _generate(self, tokens: list[int], limit: int, episode: Episode) -> Generation | None:
        """The next tokens; None where the server finds the prompt too long for its context."""
        sampling = replace(
            self._sampling,
            max_new_tokens=limit,
            stop_token_ids=tuple(self._renderer.stop_ids),
            seed=seed_for(episode.seed, "turn", episode.turn),
        )
        rid = content_hash([episode.task.id, episode.seed, episode.turn])
        try:
            generation = await self._client.generate(list(tokens), sampling, rid=rid)
        except asyncio.CancelledError:  # the deadline or the caller: the server is not left sampling for nobody
            with suppress(ModelFailure, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._client.abort(rid)
            raise
        except ModelFailure as failure:
            if failure.kind == "bad_request" and "context" in str(failure).lower():
                return None
            raise PolicyFailure(failure.kind, str(failure)) from failure
        if generation.finish_reason == "abort":
            raise PolicyFailure("abort", "the server aborted the request")
        return generation


def _rebase(tape: Tape, prompt: list[int], turn: int) -> None:
    """Continue from a prompt that was rendered whole: on the live branch where that is an exact prefix of it, else on
    a new branch that shares with it as many tokens as are equal."""
    if not tape.branches:
        tape.branches.append(Branch())
        tape.live.append(prompt, "prompt", turn)
        return
    parent = tape.live
    pairs = enumerate(zip(parent.tokens, prompt, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(parent.tokens), len(prompt)))
    if shared == len(parent.tokens):
        parent.append(prompt[shared:], "prompt", turn)
        return
    branch = Branch(parent=len(tape.branches) - 1, fork=shared)
    for segment in parent.segments:
        branch.append(prompt[segment.start : min(segment.end, shared)], segment.author, segment.turn)
        if segment.end >= shared:
            break
    branch.append(prompt[shared:], "prompt", turn)
    tape.branches.append(branch)


def _message(parsed: ParsedTurn) -> Message:
    """The turn as a message: a view of the sampled ids."""
    calls = [
        ToolCall(id=f"call_{index}", function=FunctionCall(name=call.name, arguments=_arguments_text(call)))
        for index, call in enumerate(parsed.calls)
    ]
    return Message(
        role="assistant", content=parsed.content, reasoning_content=parsed.reasoning, tool_calls=calls or None
    )


def _arguments_text(call: ParsedCall) -> str:
    """The argument text as written. Of a call that was refused, text that no executor can take for arguments: a whole
    call that lacks its end or its name is a JSON object too."""
    if call.malformed_reason is not None and call.arguments_text.lstrip().startswith("{"):
        return f"<tool_call>{call.raw}"
    return call.arguments_text


def _same(history: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether two histories are the same words; the ids of calls are ours and not the template's business."""
    return [_words(m) for m in history] == [_words(m) for m in messages]


def _words(message: Message) -> tuple[Any, ...]:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return (message.role, message.content, message.reasoning_content or "", calls)
