"""The F1 reward: 2h / (n + c), from what the executor did.

n is the number of nodes with a tool, c the number of calls that the policy emitted (malformed, unknown, repeated and
cached ones too) less those that a fault was injected into, h the size of the maximum matching of calls to nodes.
Too few calls cost recall, too many cost precision. In stateful mode all is 0 unless the goal holds at the end. Where
no call is due (n = 0), 1 is for emitting none and saying something. The typed answer is graded beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from astrolabe.envs.match import goal_holds, matched_nodes
from astrolabe.envs.rewards.answers import verify_answer
from astrolabe.records.environment import Environment
from astrolabe.records.trajectory import CallRecord, Reward

_ASKS = re.compile(
    r"[?？]|\b(please (provide|tell|give|specify|share)|could you|can you|which|let me know|need to know|i need the)\b"
    r"|请(提供|告诉|问|说明|补充)|需要(您|你)|哪(个|一|位|家|种|天)",
    re.IGNORECASE,
)


def asks_for_more(text: str) -> bool:
    """Whether a final turn asks the user for something (a rule over its text; only reported, never rewarded)."""
    return bool(_ASKS.search(text))


def score_f1(
    environment: Environment,
    records: Sequence[CallRecord],
    changed: Sequence[bool],
    final_state: Any,
    final_text: str,
) -> Reward:
    """The reward of one episode. `changed[i]` says whether call i changed the state; `final_state` is the state at the
    end (ignored in stateless mode); `final_text` is the policy's last turn.

    `reason`: all_hit, some_hit, no_hit, goal_missed; where no call is due: asked, abstained, needless_call, empty_turn.
    """
    reward = f1_of_calls(environment, records, changed, final_state, final_text)
    if environment.answer_type == "none":
        return reward
    verdict = verify_answer(final_text, environment.answer, environment.answer_type)
    return reward.model_copy(update={"answer_correct": verdict.correct})


def f1_of_calls(
    environment: Environment,
    records: Sequence[CallRecord],
    changed: Sequence[bool],
    final_state: Any,
    final_text: str,
) -> Reward:
    """`score_f1` without grading the answer."""
    counted = sum(not record.injected for record in records)
    targets = sum(node.tool is not None for node in environment.nodes)
    if targets == 0:
        if records:
            value, reason = 0.0, "needless_call"
        elif not final_text.strip():
            value, reason = 0.0, "empty_turn"
        else:
            value, reason = 1.0, "asked" if asks_for_more(final_text) else "abstained"
        return Reward(value=value, kind="f1", reason=reason, calls=counted, targets=0)
    hits = list(matched_nodes(environment, records, changed))
    value = 2 * len(hits) / (targets + counted)
    reason = "all_hit" if len(hits) == targets else "some_hit" if hits else "no_hit"
    if environment.mode == "stateful" and not goal_holds(environment.goal, final_state):
        value, reason = 0.0, "goal_missed"
    return Reward(value=value, kind="f1", reason=reason, hits=hits, calls=counted, targets=targets)
