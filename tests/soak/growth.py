"""Whether something that a pool uses keeps growing while its load stays the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

TOLERANCE = 0.05


@dataclass(frozen=True)
class Growth:
    """How much of something was used, early and late in a soak, as medians of a quarter of the samples each."""

    name: str
    early: float
    late: float
    slack: float
    """So much more is no growth, however little there was early on; in the unit of the samples."""

    @property
    def is_growing(self) -> bool:
        """Whether there was more late than the tolerance and the slack allow."""
        return self.late > (1 + TOLERANCE) * self.early + self.slack


def growth(name: str, samples: Sequence[float], *, slack: float) -> Growth:
    """Compare the last quarter of ``samples`` with the second one. In the first, a pool fills what it retains."""
    quarter = len(samples) // 4
    if quarter == 0:
        raise ValueError(f"{len(samples)} samples are too few: at least 4 are needed")
    return Growth(name, median(samples[quarter : 2 * quarter]), median(samples[-quarter:]), slack)
