"""Whether the demo reached every step, and both jobs ended with the parameters of undisturbed runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from resile_shared.http.api import JobView
from resile_shared.messages.reports import EpochCount

from .recording import Recording, Stretch
from .story import Part

LEAST = 10  # committed iterations at each number of workers


@dataclass(frozen=True)
class Ending:
    """The end of one job of the demo, and the result of the same training alone."""

    part: Part
    job: JobView
    stretches: Sequence[Stretch]
    alone_sha256: str


def endings(parts: Sequence[Part], jobs: Sequence[JobView], recording: Recording, alone: Sequence[str]) -> list[Ending]:
    """Combine the data of each job."""
    return [Ending(part, job, recording.stretches(job), sha) for part, job, sha in zip(parts, jobs, alone, strict=True)]


def faults(ending: Ending) -> Iterator[str]:
    """Yield each deviation from what the demo promises."""
    part, job = ending.part, ending.job
    settled = [stretch.workers for stretch in ending.stretches if stretch.last - stretch.first >= LEAST]
    if not _runs_through(settled, part.workers):
        yield f"{part.name} should train with {_list(part.workers)} workers, {LEAST} iterations each; it had {settled}"
    if any(late.first != early.last for early, late in pairwise(ending.stretches)):
        yield f"the history of {part.name} has a gap"
    if job.bits != "same bits":
        yield f"{part.name} reports its bits as: {job.bits}"
    if not job.ledger or not all(map(used_once, job.ledger)):
        yield f"the ledger of {part.name} does not show every sample exactly once"
    if job.params_sha256 != ending.alone_sha256:
        yield f"the parameters of {part.name} differ from those of an undisturbed run"


def _runs_through(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether ``wanted`` are among ``sizes``, in this order."""
    rest = iter(sizes)
    return all(number in rest for number in wanted)


def used_once(epoch: EpochCount) -> bool:
    """Whether every sample of the epoch was used, and none twice."""
    return (epoch.once, epoch.more, epoch.never) == (epoch.samples, 0, 0)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
