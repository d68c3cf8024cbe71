"""How noisy the gradient is: the simple noise scale (S. McCandlish et al., arXiv:1812.06162, section 2.2, appendix A).

It is the trace of the covariance of a sample's gradient divided by the squared norm of the mean gradient, in samples:
about the batch beyond which more samples bring little. Both are estimated from one iteration, since the gradients of
its shards are known before they are summed. With N samples in V shards, P the squared norm of the batch's gradient, and
Q that of a shard's gradient, averaged by samples::

    E[P] = |G|^2 + tr(S) / N        E[Q] = |G|^2 + tr(S) V / N

so tr(S) is estimated by N (Q - P) / (V - 1) and |G|^2 by (V P - Q) / (V - 1), without bias and whatever the batch.
"""

import math
from typing import Any, NamedTuple

NOISE_EVERY = 8
"""The noise scale is measured in one of this many batches of an epoch: it changes slowly, and norms of all gradients
cost up to a tenth of a small model's iteration."""
DECAY = 0.95
"""The decay of the moving averages per measured iteration: single estimates vary widely."""


class SquaredNorms(NamedTuple):
    """Squared norms of the gradients of one iteration."""

    of_shards: float
    """The squared norm of a shard's gradient, averaged over the shards by samples."""
    of_batch: float


class NoiseScale:
    """Moving averages over the iterations of a run. Part of its state, and equal on all members."""

    def __init__(self) -> None:
        self._variance = 0.0
        self._square = 0.0

    def add(self, norms: SquaredNorms, *, num_samples: int, num_shards: int) -> None:
        """Take the gradients of an iteration into account, unless it has a single shard or the norms are not finite.

        Both averages start at 0 and are weighted alike, so the bias of the start cancels in their ratio.
        """
        if num_shards < 2 or not all(map(math.isfinite, norms)):
            return
        shards, batch = norms
        variance = num_samples * (shards - batch) / (num_shards - 1)
        square = (num_shards * batch - shards) / (num_shards - 1)
        self._variance += (1 - DECAY) * (variance - self._variance)
        self._square += (1 - DECAY) * (square - self._square)

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None while it is not known, or too large to be measured."""
        if self._variance <= 0.0 or self._square <= 0.0:
            return None
        return self._variance / self._square

    def state_dict(self) -> dict[str, Any]:
        """The averages."""
        return {"variance": self._variance, "square": self._square}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        self._variance, self._square = state["variance"], state["square"]
