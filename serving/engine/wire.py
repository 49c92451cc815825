"""What the engine's server reads: SGLang's and OpenAI's request bodies, refused where they ask for what is not done.

An option that would be ignored in silence is an error instead: a sampler that drops a penalty, or a schema, gives
answers that look right.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.chat import ModelFailure
from serving.tokens import PauseMode, Sampling


def refuse(what: str, instead: str) -> ModelFailure:
    return ModelFailure("bad_request", f"{what} is not supported by this server; {instead}")


class SamplingParams(BaseModel):
    """SGLang's `sampling_params`. Members that are not done here must have the value that means nothing."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    sampling_seed: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    stop: str | list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def sampling(self) -> Sampling:
        """ModelFailure (bad_request) where something is asked for that this server does not do."""
        neutral = {
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "n": 1,
        }
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise refuse(f"{name}={getattr(self, name)!r}", f"leave it at {value!r}")
        if self.stop:
            raise refuse("stop (strings)", "use stop_token_ids")
        for name in ("json_schema", "regex", "ebnf", "structural_tag"):
            if getattr(self, name) is not None:
                raise refuse(name, "leave it out")
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            seed=self.sampling_seed,
        )


class GenerateBody(BaseModel):
    """`/generate`: one prompt, or a batch (`input_ids` a list of lists, the other members lists or one value)."""

    model_config = ConfigDict(extra="ignore")

    rid: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = Field(default_factory=lambda: SamplingParams())
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    lora_path: str | None = None

    def check(self) -> None:
        if self.return_logprob and self.logprob_start_len != -1:
            raise refuse("logprob_start_len (log-probs of the prompt)", "leave it at -1")
        if self.top_logprobs_num:
            raise refuse("top_logprobs_num", "leave it at 0")
        if self.lora_path:
            raise refuse("lora_path", "serve the merged weights")


class ChatBody(BaseModel):
    """`/v1/chat/completions`, as far as it is done. Members without a meaning here (`user`, ...) are passed over."""

    model_config = ConfigDict(extra="ignore")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = "default"
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    n: int = Field(default=1, ge=1, le=64)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool | None = None

    def check(self) -> None:
        if self.response_format and self.response_format.get("type") != "text":
            raise refuse(f"response_format {self.response_format.get('type')!r}", "ask for JSON in the prompt")
        if self.stop:
            raise refuse("stop (strings)", "use stop_token_ids")
        if self.frequency_penalty or self.presence_penalty:
            raise refuse("a penalty", "leave it at 0")
        if self.tool_choice not in ("auto", "none", None):
            raise refuse(f"tool_choice {self.tool_choice!r}", "use auto or none")
        if self.logprobs:
            raise refuse("logprobs", "use /generate with return_logprob")
        if self.stream and self.n > 1:
            raise refuse("stream with n > 1", "ask for one choice at a time")
        unknown = set(self.chat_template_kwargs) - {"enable_thinking"}
        if unknown:
            raise refuse(f"chat_template_kwargs {sorted(unknown)}", "only enable_thinking is known")

    def sampling(self, seed: int | None, room: int) -> Sampling:
        return Sampling(
            max_new_tokens=self.max_completion_tokens or self.max_tokens or max(1, room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            seed=seed,
        )


class PauseBody(BaseModel):
    mode: PauseMode = "retract"


class AbortBody(BaseModel):
    rid: str | None = None
    abort_all: bool = False


class UpdateBody(BaseModel):
    """`/update_weights_from_disk`. Reusable prefixes are always dropped: `flush_cache` false is an error."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: Literal[True] = True
