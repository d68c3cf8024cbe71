"""The policies by name."""

from resile_shared.policies import PolicyName

from .demand import RankedPolicy
from .elastic_batch import elastic_batch
from .goodput import goodput
from .ranked import fairshare, fifo, priority
from .ranking import by_priority, by_submission, in_turn

POLICIES: dict[PolicyName, RankedPolicy] = {
    PolicyName.FAIRSHARE: RankedPolicy(fairshare, in_turn),
    PolicyName.FIFO: RankedPolicy(fifo, by_submission),
    PolicyName.PRIORITY: RankedPolicy(priority, by_priority),
    PolicyName.ELASTIC_BATCH: RankedPolicy(elastic_batch, in_turn),
    PolicyName.GOODPUT: RankedPolicy(goodput, in_turn),
}
