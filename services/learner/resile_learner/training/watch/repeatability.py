"""Whether a shard gives the same batch, loss and gradients wherever and however often it is computed.

At some iterations every worker computes the first shard, beside its own. Headers carry the outcome.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from resile_shared.errors import UsageError

from ...session import View
from ...state.facts import MembersDiffer, minority
from ..data.fetch import Fetched
from ..digest import content_digest

REMEDY = (
    "Draw from the global generators of python, numpy or torch, which are seeded for each sample and each shard, and "
    "not from a generator of your own, the time or the id of a process"
)

EXPLAINED = 'docs/elastic-training.md, "Detecting incorrect training"'

_LOSS = (
    "probably the model or the body of the loop draws from a random generator of its own, keeps a value from batch to "
    "batch (such as a hidden state), or uses what a worker that has just joined does not know (an attribute of the "
    f"model that the script has changed). {REMEDY}; and keep such values in state={{...}} of the training call "
    f"({EXPLAINED})"
)
_GRADIENTS = (
    "probably a gradient hook or a custom backward pass keeps a value from one backward pass to the next (such as a "
    f"running norm), or draws from a random generator of its own. {REMEDY} ({EXPLAINED})"
)
_AGAIN = "when it is computed again after others, with the same parameters, as another worker would compute it"


class ShardFingerprint(NamedTuple):
    """What a worker read and computed of the first shard."""

    batch: str
    loss: str
    gradients: str = ""


class NotRepeatable(UsageError):
    """The same shard gave something else when it was read or computed again."""


class NewMembers:
    """The members that nobody has compared with the others yet: those that began with this generation or one before.

    Each names itself in its headers. The others wait for it in its first iteration, so it computes the first shard
    beside its own in the next one; one other member is enough to compare it with.
    """

    def __init__(self) -> None:
        self.is_new = True
        """Whether this worker is one of the new members."""
        self._new: frozenset[int] = frozenset()

    def takes_part(self, view: View) -> bool:
        """Whether this worker is compared in the next iteration: it is new, or the one that new ones are compared with.

        That is rank 0, which computes the first shard in any case, or, if rank 0 is new, the first that is not.
        """
        new = self._new.intersection(view.workers)
        others = [worker for worker in view.workers if worker not in new]
        return bool(new) and view.size > 1 and (view.me in new or view.me == others[0])

    def on_round(self, view: View, are_new: Sequence[bool], fingerprints: Sequence[ShardFingerprint | None]) -> None:
        """Handle an iteration's headers: by rank, who is new, and the fingerprint of the first shard, if computed."""
        compared = {worker for worker, print_ in zip(view.workers, fingerprints, strict=True) if print_ is not None}
        if len(compared) < 2:
            compared = set()
        self._new = frozenset(worker for worker, is_new in zip(view.workers, are_new, strict=True) if is_new) - compared
        if view.me in compared:
            self.is_new = False


def is_compared_in_epoch(epoch: int) -> bool:
    """Whether the first iteration of ``epoch`` compares the first shard: in epochs 0, 1, 2, 4, 8 and so on."""
    return epoch & (epoch - 1) == 0


def is_compared_iteration(number: int) -> bool:
    """Whether iteration ``number`` compares the first shard: 0, 2, 4, 6, 8, 12, 16, 24 and so on, ever more rarely.

    No two are neighbours: a generator that goes on from shard to shard cannot be at the same number in both on workers
    that compute one shard more or less than others. And each is at most twice the one before: what a body does from a
    certain number of its own batches on, a worker with fewer shards does correspondingly later.
    """
    power = number & -number
    return number % 2 == 0 and number in (0, power, 3 * power)


def read_twice(read: Callable[[], Fetched]) -> Fetched:
    """Read a shard twice. Raises NotRepeatable when the second time gives other samples."""
    first, second = read(), read()
    check_same_batch(first.batch, second.batch)
    return second


def check_same_batch(batch: Any, again: Any) -> None:
    """Raises NotRepeatable when a shard was read with two different outcomes."""
    if content_digest(batch) != content_digest(again):
        raise NotRepeatable(
            "the dataset (or the collate_fn) gives other samples when the same shard of the same epoch is read "
            f"again, so that they would depend on which worker reads them. {REMEDY}"
        )


def fingerprint(batch: Any, loss: Tensor | float) -> ShardFingerprint:
    """The fingerprint of a collated ``batch`` with its mean ``loss``, which counts with all its bits."""
    return ShardFingerprint(content_digest(batch), float(loss.detach() if isinstance(loss, Tensor) else loss).hex())


def check_computed_again(first: ShardFingerprint, again: ShardFingerprint, *, has_same_bits: bool) -> None:
    """Compare what a worker by itself has computed of one shard, after others too. Raises NotRepeatable.

    Where an operation has no deterministic form, it may differ by rounding, and is not compared.
    """
    if not has_same_bits or first == again:
        return
    if first.loss == again.loss:
        raise NotRepeatable(f"the same shard has other gradients {_AGAIN}: {_GRADIENTS}")
    raise NotRepeatable(f"the same shard has another loss {_AGAIN}: {_LOSS}")


def check_fingerprints(
    fingerprints: Sequence[ShardFingerprint | None], workers: Sequence[int], *, has_same_bits: bool = True
) -> None:
    """Compare the results of one shard from those ``workers`` that computed it. Raises MembersDiffer.

    Where an operation has no deterministic form, what they computed may differ by rounding, and is not compared.
    """
    known = {worker: print_ for print_, worker in zip(fingerprints, workers, strict=True) if print_ is not None}
    if not known:
        return
    who_knows, prints = zip(*sorted(known.items()), strict=True)  # of two the later one, which has joined, is named
    _, who = minority([print_.batch for print_ in prints], who_knows)
    if who:
        raise MembersDiffer(
            f"{who} read other samples than the others for the same shard of the same epoch: probably the dataset "
            f"(or the collate_fn) draws from a random generator of its own. {REMEDY} ({EXPLAINED})"
        )
    if not has_same_bits:
        return
    _, who = minority([print_.loss for print_ in prints], who_knows)
    if who:
        raise MembersDiffer(
            f"{who} computed another loss than the others for the same batch and the same parameters: {_LOSS}"
        )
    _, who = minority([print_.gradients for print_ in prints], who_knows)
    if who:
        raise MembersDiffer(
            f"{who} computed other gradients than the others for the same batch, the same parameters and the same "
            f"loss: {_GRADIENTS}"
        )
