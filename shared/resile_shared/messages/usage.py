"""How many slots jobs and tenants have held, and for how long."""

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
