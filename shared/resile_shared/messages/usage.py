"""How many slots jobs and tenants have held, and for how long: in slot-milliseconds, and by the hour for the last week.

What is stored changes only when the number of slots changes. In between, what has been used follows from the clock:
so no restart loses or doubles anything.
"""

from datetime import datetime, timedelta

from pydantic import Field

from .message import Count, Id, Message, Time

HOURS_KEPT = 169
"""Hours for which usage is kept: a week, and the hour in which it begins."""
MAX_COUNTED = 1000
"""The maximum number of jobs of one tenant that are removed at a time."""


class HourUsage(Message):
    """What was used in one hour."""

    hour: Count = Field(description="hours since the epoch, UTC")
    slot_milliseconds: Count


class SlotUsage(Message):
    """What was used until ``since``, and how many slots are held from then on."""

    slots: Count = 0
    since: Time | None = Field(default=None, description="None: no slot is held")
    slot_milliseconds: Count = 0
    hours: tuple[HourUsage, ...] = Field(
        default=(), max_length=HOURS_KEPT, description="of it, what was used in each hour of the last week"
    )


class RemovedUsage(Message):
    """What the jobs of one tenant have used that are removed. The scheduler that leads stores it."""

    tenant: Id
    used: SlotUsage = SlotUsage()
    jobs: tuple[Id, ...] = Field(
        default=(), max_length=MAX_COUNTED, description="jobs whose records may still exist, and which are counted here"
    )


HOUR_MS = 3_600_000


def hold(usage: SlotUsage, slots: int, *, now: datetime) -> SlotUsage:
    """Return the usage of a job that holds ``slots`` from ``now`` on."""
    until = until_now(usage, now=now)
    since = max(now, usage.since) if usage.since else now
    return until.model_copy(update={"slots": slots, "since": since if slots else None})


def until_now(usage: SlotUsage, *, now: datetime) -> SlotUsage:
    """Return the usage with what the job has held until ``now``. A clock that goes back adds nothing."""
    if not usage.slots or usage.since is None or now <= usage.since:
        return usage
    begin, end = milliseconds(usage.since), milliseconds(now)
    hours = {used.hour: used.slot_milliseconds for used in usage.hours}
    for hour in range(max(begin // HOUR_MS, end // HOUR_MS - HOURS_KEPT), end // HOUR_MS + 1):
        inside = min(end, (hour + 1) * HOUR_MS) - max(begin, hour * HOUR_MS)
        hours[hour] = hours.get(hour, 0) + usage.slots * inside
    total = usage.slot_milliseconds + usage.slots * (end - begin)
    return usage.model_copy(update={"since": now, "slot_milliseconds": total, "hours": _kept(hours)})


def add(first: SlotUsage, second: SlotUsage) -> SlotUsage:
    """Return the sum of what two have used; neither holds slots."""
    hours = {used.hour: used.slot_milliseconds for used in first.hours}
    for used in second.hours:
        hours[used.hour] = hours.get(used.hour, 0) + used.slot_milliseconds
    return SlotUsage(slot_milliseconds=first.slot_milliseconds + second.slot_milliseconds, hours=_kept(hours))


def used_since(usage: SlotUsage, begin: datetime | None, *, now: datetime) -> int:
    """Return the slot-milliseconds from ``begin``, which is the beginning of an hour, until ``now``; None: all."""
    until = until_now(usage, now=now)
    if begin is None:
        return until.slot_milliseconds
    first = milliseconds(begin) // HOUR_MS
    return sum(used.slot_milliseconds for used in until.hours if used.hour >= first)


def hour_of(time: datetime) -> datetime:
    """Return the beginning of the hour."""
    return time - timedelta(milliseconds=milliseconds(time) % HOUR_MS)


def milliseconds(time: datetime) -> int:
    """Return the whole milliseconds since the epoch."""
    return round(time.timestamp() * 1000)


def _kept(hours: dict[int, int]) -> tuple[HourUsage, ...]:
    newest = max(hours, default=0)
    return tuple(
        HourUsage(hour=hour, slot_milliseconds=used)
        for hour, used in sorted(hours.items())
        if hour > newest - HOURS_KEPT and used
    )
