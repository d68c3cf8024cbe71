"""The policies by name."""

from resile_shared.policies import PolicyName

from .demand import Policy
from .elastic_batch import elastic_batch
from .fairshare import fairshare
from .fifo import fifo
from .priority import priority

POLICIES: dict[PolicyName, Policy] = {
    PolicyName.FAIRSHARE: fairshare,
    PolicyName.FIFO: fifo,
    PolicyName.PRIORITY: priority,
    PolicyName.ELASTIC_BATCH: elastic_batch,
}
