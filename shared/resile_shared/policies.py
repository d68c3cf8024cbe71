"""The names of the policies by which jobs share slots, and limits of the numbers of tenants."""

from enum import StrEnum


class PolicyName(StrEnum):
    """How jobs share slots; the modules of `resile_scheduler/policies/` have the rules."""

    FAIRSHARE = "fairshare"
    FIFO = "fifo"
    PRIORITY = "priority"
    ELASTIC_BATCH = "elastic-batch"
    GOODPUT = "goodput"


POLICIES_HELP = (
    "fairshare: slots in proportion to priority; fifo: the job submitted first takes all it can use, then the next; "
    "priority: the highest priority first; elastic-batch: slots and batches where they speed jobs up most; goodput: "
    "the same, weighted by the value of a sample in a larger batch"
)
MAX_WEIGHT = 1_000_000
MAX_QUOTA = 1_000_000
