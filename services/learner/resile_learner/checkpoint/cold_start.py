"""How the members of a cold start agree on the checkpoint that they begin with.

The first that has read a complete one decides: it writes the lineage's `Start`, which can be written once. The others
load what that names, so no member trains with another state, whichever of them are lost meanwhile.
"""

from ..state.flat import Allocate
from .lineage import Start
from .store import CheckpointStore, Loaded


def load_agreed(store: CheckpointStore, *, job: str, lineage: int, allocate: Allocate) -> tuple[Start, Loaded | None]:
    """Read the checkpoint that ``lineage`` begins with into the tensors that ``allocate(skeleton)`` makes.

    Returns the decision, and the checkpoint; None if the decision is to begin without one. Then the tensors that
    ``allocate`` made, if it was called, hold no valid state. Raises DamagedError if the chosen checkpoint is damaged
    here, LineageFencedError if there is a newer lineage, StorageError when the storage fails.
    """
    start, loaded = store.read_start(lineage), None
    if start is None:
        store.fence(lineage)
        loaded, skipped = store.load_newest(allocate, lineage=lineage)
        name = loaded.manifest.checkpoint.name if loaded else None
        start = store.decide_start(Start(job=job, lineage=lineage, checkpoint=name, skipped=skipped))
    if start.checkpoint is None:
        return start, None
    if loaded is None or loaded.manifest.checkpoint != start.base:
        loaded = store.load(start.checkpoint, allocate)
    return start, loaded
