"""Do the engine that samples and the trainer that learns agree on the log-probs of the sampled tokens?

They run the same weights through different code; what differs in precision is small, and what is large is a fault: a
wrong temperature, a truncated distribution, a cache that survived a weight update. Measured over the tokens that the
very weights of the trainer sampled; a stale token's difference is off-policyness, not a fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from astrolabe.records.errors import RunError


@dataclass(frozen=True)
class Agreement:
    tokens: int
    kl: float
    """Mean of exp(d) - 1 - d, with d = trainer - engine: the k3 estimate of KL(engine || trainer), nats per token."""
    outside: float
    """Share of tokens whose ratio exp(d) is outside [0.5, 2]."""
    largest: float
    """Largest |d|, nats."""

    def metrics(self) -> dict[str, float]:
        return {"mismatch_kl": self.kl, "mismatch_outside": self.outside, "mismatch_max": self.largest}


def agreement(trainer: Any, engine: Any, mask: Any) -> Agreement:
    """Compare two arrays of log-probs of equal shape where `mask` is not 0."""
    chosen = np.asarray(mask) != 0
    d = np.asarray(trainer, np.float64)[chosen] - np.asarray(engine, np.float64)[chosen]
    if d.size == 0:
        return Agreement(0, 0.0, 0.0, 0.0)
    bounded = np.clip(d, -20.0, 20.0)
    return Agreement(
        tokens=int(d.size),
        kl=float(np.mean(np.exp(bounded) - 1 - bounded)),
        outside=float(np.mean(np.abs(d) > np.log(2.0))),
        largest=float(np.abs(d).max()),
    )


@dataclass(frozen=True, kw_only=True)
class MismatchGate:
    """Limits in nats per token of `Agreement.kl`: above `warn` the run says so, above `stop` it ends."""

    warn: float = 1e-3
    stop: float = 1e-1

    def check(self, found: Agreement) -> bool:
        """Whether to warn. RunError above `stop`, or where a log-prob is not a number."""
        if not found.kl <= self.stop:
            raise RunError(
                f"engine and trainer disagree on log-probs: KL {found.kl:.3g} nats per token over {found.tokens} tokens, "
                f"{found.outside:.1%} of ratios outside 0.5 to 2",
                "look for a temperature or top-p that differs, a stale cache, or other weights in the server",
            )
        return found.kl > self.warn
