import numpy as np

from resile_learner.training.ledger import Ledger
from resile_shared.messages.reports import EpochCount


def test_the_ledger_counts_what_was_fetched_not_what_was_planned() -> None:
    ledger = Ledger(4)
    ledger.commit(0, np.array([0, 1]))
    ledger.commit(0, np.array([1, 2]))
    ledger.commit(1, np.array([3]))
    assert ledger.epochs() == (
        EpochCount(epoch=0, samples=4, once=2, more=1, never=1),
        EpochCount(epoch=1, samples=4, once=1, more=0, never=3),
    )
    assert ledger.samples_seen == 5


def test_a_ledger_goes_on_elsewhere() -> None:
    ledger = Ledger(3)
    ledger.commit(0, np.array([0, 1]))
    copy = Ledger(3)
    copy.load_state_dict(ledger.state_dict())
    copy.commit(0, np.array([2]))
    assert copy.epochs() == (EpochCount(epoch=0, samples=3, once=3, more=0, never=0),)
