"""How long slots were idle in the demo although a job could use them: the white areas of its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .recording import Recording, Stretch


@dataclass(frozen=True)
class Idle:
    """Slot-seconds from the first iteration of the first job to the end of the last one.

    Either job could use all slots at any time. The slots of a host that was killed do not count until it is back.
    """

    slot_seconds: float
    of: float

    @property
    def share(self) -> float:
        """Part of all slot-seconds, from 0 to 1."""
        return self.slot_seconds / self.of if self.of else 0.0


def idle_slots(stretches: Sequence[Sequence[Stretch]], recording: Recording) -> Idle:
    """Return how long slots were idle; ``stretches`` has the stretches of each job."""
    every = [stretch for each in stretches for stretch in each]
    if not every:
        return Idle(0.0, 0.0)
    begin, end = min(s.begin for s in every), max(s.end for s in every)
    moments = {begin, end, *(seconds for seconds, _ in recording.slots)}
    moments.update(moment for stretch in every for moment in (stretch.begin, stretch.end))
    idle = of = 0.0
    for start, stop in pairwise(sorted(moment for moment in moments if begin <= moment <= end)):
        held = sum(stretch.workers for stretch in every if stretch.begin <= start < stretch.end)
        usable = next((slots for seconds, slots in reversed(recording.slots) if seconds <= start), 0)
        idle += max(0, usable - held) * (stop - start)
        of += usable * (stop - start)
    return Idle(idle, of)
