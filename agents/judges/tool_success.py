"""How many calls succeeded, from the executor's records and in code: ok / all, injected faults left out of both."""

from __future__ import annotations

from astrolabe.records.trajectory import Trajectory, Verdict

NAME = "tool_success"


def judge(trajectory: Trajectory, floor: float) -> Verdict:
    """Not applicable without calls that count."""
    counted = [call for call in trajectory.calls if not call.injected]
    if not counted:
        return Verdict(judge=NAME, verdict="not_applicable", reason="no call that counts", attempts=0)
    ok = sum(call.status == "ok" for call in counted)
    score = round(ok / len(counted), 6)
    return Verdict(
        judge=NAME,
        verdict="pass" if score >= floor else "fail",
        score=score,
        reason=f"{ok} of {len(counted)} calls succeeded",
        attempts=0,
    )
