"""The ledger: how often each sample was used, in few bytes."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from resile_learner.state.flat import flatten
from resile_learner.training.data.ledger import MAX_CLOSED, Ledger
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


@given(faulty=st.sets(st.integers(0, 2999), max_size=20), every=st.sampled_from([1, 2, 3000]))
@settings(max_examples=10, deadline=None)
def test_a_ledger_of_many_epochs_stays_small_and_counts_all(faulty: set[int], every: int) -> None:
    faulty |= set(range(0, 3000, every)) - {0}
    ledger, size = Ledger(2), 0
    for epoch in range(3000):
        ledger.commit(epoch, np.array([0] if epoch in faulty else [0, 1]))
        size = max(size, len(ledger.epochs()))
    counts = ledger.epochs()
    assert size <= MAX_CLOSED + 1
    assert sum(count.num_epochs for count in counts) == 3000
    assert [count.epoch for count in counts[1:]] == [count.epoch + count.num_epochs for count in counts[:-1]]
    assert sum(count.never for count in counts) == len(faulty)
    assert sum(count.once for count in counts) == sum(count.samples for count in counts) - len(faulty)
    if every == 3000:
        wrong = [count for count in counts if count.never]
        assert all(count.num_epochs == 1 for count in wrong), "the epochs in which something is wrong can be told"


def test_an_entry_of_one_epoch_looks_as_it_always_did() -> None:
    count = EpochCount(epoch=3, samples=4, once=2, more=1, never=1)
    assert count.model_dump() == {"epoch": 3, "samples": 4, "once": 2, "more": 1, "never": 1}
    several = EpochCount(epoch=3, num_epochs=2, samples=8, once=8, more=0, never=0)
    assert EpochCount(**several.model_dump()) == several


def test_a_sampler_is_followed_or_not() -> None:
    drawn = np.array([3, 0, 0, 2])

    def as_drawn(*batches: list[int]) -> bool | None:
        ledger = Ledger(4, lambda epoch: drawn)
        for batch in batches:
            ledger.commit(0, np.array(batch))
        return ledger.epochs()[0].as_drawn

    assert as_drawn([3, 0], [0, 2])
    assert as_drawn([3, 0]), "the epoch is under way"
    assert not as_drawn([3, 0], [2]), "a sample was left out"
    assert not as_drawn([3, 0], [2, 2])
    assert not as_drawn([3, 0, 0], [2], [1])


def test_the_ledger_of_a_stream_needs_no_memory_for_samples_that_were_used_once() -> None:
    ledger = Ledger()
    for begin in range(0, 300_000, 1000):
        ledger.commit(0, np.random.default_rng(begin).permutation(1000) + begin)
    flat = flatten(ledger.state_dict())
    assert len(flat.skeleton) + sum(tensor.nbytes for tensor in flat.tensors) < 1000
    assert ledger.epochs() == (EpochCount(epoch=0, samples=300_000, once=300_000, more=0, never=0),)


@given(
    batches=st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=12),
    ends=st.sets(st.integers(0, 11)),
    moved=st.integers(0, 11),
)
@settings(deadline=None)
def test_the_ledger_of_a_stream_counts_whatever_was_used(batches: list[list[int]], ends: set[int], moved: int) -> None:
    ledger, epoch, uses, expected = Ledger(), 0, Counter[int](), []
    for number, batch in enumerate(batches):
        if number == moved:
            copy = Ledger()
            copy.load_state_dict(ledger.state_dict())
            ledger = copy
        ledger.commit(epoch, np.array(batch, dtype=np.int64))
        uses.update(batch)
        samples = max(uses, default=-1) + 1
        once, never = sum(count == 1 for count in uses.values()), samples - len(uses)
        count = EpochCount(epoch=epoch, samples=samples, once=once, more=samples - once - never, never=never)
        expected[epoch:] = [count]
        if number in ends:
            epoch, uses = epoch + 1, Counter()
    if not ledger.samples_seen:
        assert ledger.epochs() == ()
        return
    assert ledger.epochs() == tuple(expected)
