"""Reads what is to be simulated: a made-up load, a CSV workload, or the history of a pool."""

from dataclasses import replace
from pathlib import Path

from resile_shared.errors import UsageError

from .history import read_history
from .synthetic import LOADS, synthetic
from .tables import read_table
from .workload import Workload, equal_hosts

DEFAULT_SLOTS = 40
SLOTS_PER_HOST = 8
MAX_SLOTS = 100_000


def read_trace(
    trace: str,
    *,
    num_slots: int | None = None,
    num_hosts: int | None = None,
    profiles: Path | None = None,
    hours: float = 4.0,
    seed: int = 0,
) -> Workload:
    """Return the workload that ``trace`` names, with its hosts.

    A history has hosts of its own; with ``num_slots`` or ``num_hosts`` it is simulated on equal hosts instead, as other
    workloads are. ``hours`` and ``seed`` are those of a made-up load.

    Raises:
        UsageError: there is no such trace, or no such pool.
        MalformedFile: the file, or a profile that it needs, cannot be read.

    """
    path = Path(trace)
    if trace not in LOADS and not path.is_file():
        raise UsageError(f"no trace {trace}: name a history (JSON), a workload (.csv), or {', '.join(LOADS)}")
    slots = num_slots or (num_hosts * SLOTS_PER_HOST if num_hosts else DEFAULT_SLOTS)
    if slots > MAX_SLOTS:
        raise UsageError(f"a pool of {slots} slots: at most {MAX_SLOTS} can be simulated")
    hosts = equal_hosts(slots, num_hosts or -(-slots // SLOTS_PER_HOST))
    if trace not in LOADS and path.suffix != ".csv":
        recorded = read_history(path)
        return recorded if num_slots is None and num_hosts is None else replace(recorded, hosts=hosts)
    if trace in LOADS:
        workload = synthetic(trace, num_slots=slots, hours=hours, seed=seed)
    else:
        workload = read_table(path, profiles=profiles, num_slots=slots)
    return replace(workload, hosts=hosts)
