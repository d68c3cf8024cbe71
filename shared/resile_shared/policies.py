"""The names of the policies by which jobs share slots, and limits of the numbers of tenants."""

from enum import StrEnum
from typing import Self


class PolicyName(StrEnum):
    """How jobs share slots; the modules of `resile_scheduler/policies/` have the rules."""

    description: str
    """What the policy does, for help texts and the page."""

    def __new__(cls, name: str, description: str) -> Self:
        """Make one row of the table."""
        policy = str.__new__(cls, name)
        policy._value_ = name
        policy.description = description
        return policy

    FAIRSHARE = "fairshare", "slots in proportion to the priorities of jobs, and to the weights of their tenants"
    FIFO = "fifo", "the job submitted first takes all it can use, then the next"
    PRIORITY = "priority", "the highest priority takes all it can use, then the next"
    ELASTIC_BATCH = "elastic-batch", "slots and batches where they raise the throughput of jobs most"
    GOODPUT = "goodput", "slots and batches where they help training most, by what a sample in a larger batch is worth"


POLICIES_HELP = "; ".join(f"{policy}: {policy.description}" for policy in PolicyName)
MAX_WEIGHT = 1_000_000
MAX_QUOTA = 1_000_000
