"""Which worker was on which slot, and when, by the agents' logs. Pure."""

import re
from collections.abc import Iterator

_STARTED = re.compile(r"^(\S+) .*: starting worker job=(\S+) worker=(\d+) slot=(\d+)")
_EXITED = re.compile(r"^(\S+) .*: worker exited job=(\S+) worker=(\d+):")
_INCARNATION = re.compile(r": starting agent host=(\S+) incarnation=(\d+)")


def slots_with_two_workers(host: str, log: str) -> Iterator[str]:
    """Yield each moment at which a worker was started on a slot whose last one had not ended.

    An incarnation of an agent begins when no process of the one before is left.
    """
    holders: dict[str, tuple[str, str]] = {}
    for line in log.splitlines():
        if _INCARNATION.search(line):
            holders.clear()
        elif started := _STARTED.match(line):
            time, job, worker, slot = started.groups()
            if slot in holders:
                other, number = holders[slot]
                yield f"{host}/{slot}: worker {worker} of {job} was started at {time}, worker {number} of {other} lives"
            holders[slot] = job, worker
        elif exited := _EXITED.match(line):
            _, job, worker = exited.groups()
            holders = {slot: holder for slot, holder in holders.items() if holder != (job, worker)}
