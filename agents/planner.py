"""The planner: proposes chains of tools, votes on them, writes tasks, varies them, reads them back and rates them.

Six small agents, since each is asked, validated and repaired on its own. `check_task` is the back translation: it sees a
question and the tools but not the chain that the question was written for, and the pipeline compares.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agents.base import Agent, Strict
from astrolabe.records.messages import FunctionSchema
from astrolabe.records.trajectory import TaskKind

Rating = Literal["very_poor", "poor", "fair", "good", "excellent"]
RATING_SCORE: dict[str, int] = {"very_poor": 1, "poor": 2, "fair": 3, "good": 4, "excellent": 5}
AugmentMode = Literal["diverse", "complex", "persona"]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")
    language: Literal["en", "zh"] = "en"


class ServerInfo(BaseModel):
    name: str
    description: str = ""
    domain: str = ""


class ChainsRequest(_Request):
    server: ServerInfo
    tools: list[FunctionSchema]
    max_chains: int = 6
    max_length: int = 5


class ProposedChain(Strict):
    tools: list[str] = Field(min_length=1)
    dependency: Literal["yes", "no", "not_sure"]
    """Whether each tool really needs what an earlier one gave."""
    task: str
    """What the chain achieves, in a sentence."""


class ChainsReply(Strict):
    chains: list[ProposedChain]


class VoteRequest(_Request):
    server: ServerInfo
    tools: list[FunctionSchema]
    """The documents of the chain's tools."""
    chain: list[str]


class VoteReply(Strict):
    valid: bool
    reason: str


class TaskRequest(_Request):
    server: ServerInfo
    tools: list[FunctionSchema]
    """All tools of the server."""
    chain: list[str] | None = None
    """The chain that the task must need, in order; null: the planner chooses up to `max_tools` tools itself."""
    kind: TaskKind = "answer"
    max_tools: int = 3


class TaskReply(Strict):
    question: str = Field(min_length=1)
    chain: list[str]
    """The tools that the task needs, in order; empty for a task that no tool can do."""


class CheckRequest(_Request):
    question: str
    tools: list[FunctionSchema]


class CheckReply(Strict):
    kind: Literal["answer", "abstain", "ask"]
    """abstain: no tool fits; ask: something that a tool needs is not said."""
    chain: list[str]


class AugmentRequest(_Request):
    question: str
    chain: list[str]
    tools: list[FunctionSchema]
    mode: AugmentMode
    persona: dict[str, Any] | None = None


class AugmentReply(Strict):
    question: str = Field(min_length=1)


class ScoreRequest(_Request):
    question: str
    kind: TaskKind
    chain: list[str]
    tools: list[FunctionSchema]


class ScoreReply(Strict):
    question_quality: Rating
    scenario_realism: Rating
    tool_necessity: Rating


propose_chains = Agent("planner.chains", request=ChainsRequest, reply=ChainsReply, prompt="planner_chains")
vote_chain = Agent("planner.vote", request=VoteRequest, reply=VoteReply, prompt="planner_vote")
write_task = Agent("planner.task", request=TaskRequest, reply=TaskReply, prompt="planner_task")
check_task = Agent("planner.check", request=CheckRequest, reply=CheckReply, prompt="planner_check", temperature=0.0)
augment_task = Agent("planner.augment", request=AugmentRequest, reply=AugmentReply, prompt="planner_augment")
score_task = Agent("planner.score", request=ScoreRequest, reply=ScoreReply, prompt="planner_score", temperature=0.0)

AGENTS = (propose_chains, vote_chain, write_task, check_task, augment_task, score_task)
graph = propose_chains.graph
