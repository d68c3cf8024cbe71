import math

import numpy as np
import torch

from resile_learner.collectives.tree import Interval, pieces, ranges
from resile_learner.training.header import Header, Partial, Totals, fold_leaves
from resile_learner.training.stragglers import Pace


def test_a_header_survives_the_wire() -> None:
    like = [torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.zeros(2, 2, dtype=torch.bfloat16)]
    deltas = {0: torch.tensor([1.0, -0.0, math.inf]), 1: torch.tensor(7), 2: torch.ones(2, 2, dtype=torch.bfloat16)}
    header = Header(
        named=4,
        digest=2**60 + 1,
        indices=np.array([5, 3, 9]),
        used=bytes([1, 0, 1]),
        partials=[Partial({"loss": math.nan, "accuracy": 0.1}, deltas), Partial({"loss": 1e-300, "accuracy": 2.0})],
        stored=[("000-g1", 3, 99, "ab")],
        saved=["000-g1"],
        facts={"dataset": "x"},
        busy=True,
        checkpoint=True,
        pace=Pace(2, 0.1, 0.2, 0.25, 0.0, 1, 0.01),
    )
    read = Header.decode(header.encode(), like.__getitem__)
    assert (read.named, read.digest, read.used, read.facts) == (4, 2**60 + 1, bytes([1, 0, 1]), {"dataset": "x"})
    assert (read.busy, read.checkpoint, list(read.saved)) == (True, True, ["000-g1"])
    assert read.pace == header.pace
    assert read.indices.tolist() == [5, 3, 9]
    assert list(read.stored) == [("000-g1", 3, 99, "ab")]
    assert math.isnan(read.partials[0].scalars["loss"])
    assert read.partials[1].scalars == {"loss": 1e-300, "accuracy": 2.0}
    for index, delta in deltas.items():
        assert torch.equal(read.partials[0].deltas[index], delta)


def test_totals_are_the_same_for_every_number_of_members() -> None:
    generator = np.random.default_rng(0)
    leaves = [
        Partial({"loss": float(generator.normal() * 10.0**k)}, {0: torch.tensor(generator.normal(size=3) * 10.0**k)})
        for k in range(11)
    ]
    expected = fold_leaves(Interval(0, 11), leaves.__getitem__)
    for size in range(1, 14):
        held = [pieces(11, part) for part in ranges(11, size)]
        headers = [
            Header(
                named=1, digest=0, indices=np.array([rank]), partials=[fold_leaves(p, leaves.__getitem__) for p in mine]
            )
            for rank, mine in enumerate(held)
        ]
        totals = Totals.of(headers, held, 11)
        assert totals.scalars == expected.scalars
        assert torch.equal(totals.deltas[0], expected.deltas[0])
        assert totals.indices.tolist() == list(range(size))
