import math

import numpy as np
import pytest
import torch

from resile_learner.checkpoint.header import CheckpointHeader, StoredPart
from resile_learner.checkpoint.manifest import PartInfo
from resile_learner.collectives.tree import Interval, pieces, ranges
from resile_learner.training.data.batches import Indices
from resile_learner.training.header import ComputedShards, PartialSums, RoundHeader, Totals, fold_leaves
from resile_learner.training.stragglers import Pace


@pytest.mark.parametrize("indices", [np.array([5, 3, 9]), np.array([5, 3, 2**32]), np.array([5, -1])])
def test_a_header_survives_the_wire(indices: Indices) -> None:
    like = [torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.zeros(2, 2, dtype=torch.bfloat16)]
    deltas = {0: torch.tensor([1.0, -0.0, math.inf]), 1: torch.tensor(7), 2: torch.ones(2, 2, dtype=torch.bfloat16)}
    part = PartInfo(number=3, num_bytes=99, sha256="ab" * 32)
    checkpoint = CheckpointHeader([StoredPart("000-g1", part)], ["000-g1"], ["000-g0"], ["000-g2"], True, True)
    partials = [
        PartialSums({"loss": math.nan, "accuracy": 0.1}, deltas),
        PartialSums({"loss": 1e-300, "accuracy": 2.0}),
    ]
    pace = Pace(2, 0.1, 0.2, 0.25, 0.0, 1, 0.01)
    computed = ComputedShards(
        partials, indices, bytes([1, 0, 1]), pace, ("put_",), left={3: (None, "sum"), 4: (2**62, "")}, late=[5]
    )
    header = RoundHeader(2**60 + 1, checkpoint, computed, pause=True, facts={"dataset": "x"})
    generation, read = RoundHeader.decode(header.encode(generation=4), like.__getitem__)
    assert generation == 4
    assert (read.digest, read.checkpoint, read.pause, read.facts) == (2**60 + 1, checkpoint, True, {"dataset": "x"})
    assert (read.computed.used, read.computed.pace) == (bytes([1, 0, 1]), pace)
    assert read.computed.operations == ("put_",)
    assert read.computed.indices.tolist() == indices.tolist()
    assert (read.computed.left, list(read.computed.late)) == ({3: (None, "sum"), 4: (2**62, "")}, [5])
    assert math.isnan(read.computed.partials[0].scalars["loss"])
    assert read.computed.partials[1].scalars == {"loss": 1e-300, "accuracy": 2.0}
    for index, delta in deltas.items():
        assert torch.equal(read.computed.partials[0].deltas[index], delta)


def test_a_header_has_as_many_indices_as_an_iteration() -> None:
    indices = np.random.default_rng(0).permutation(5_000_000)
    content = RoundHeader(7, CheckpointHeader(), ComputedShards(indices=indices)).encode(generation=1)
    assert 16 << 20 < len(content) < 21_000_000
    assert np.array_equal(RoundHeader.decode(content, lambda _: torch.zeros(()))[1].computed.indices, indices)


def test_a_header_of_an_idle_round_survives_the_wire() -> None:
    header = RoundHeader(7, CheckpointHeader())
    generation, read = RoundHeader.decode(header.encode(generation=1), lambda _: torch.zeros(()))
    assert (generation, read.digest, read.checkpoint, read.pause, read.facts) == (1, 7, CheckpointHeader(), False, {})
    assert (list(read.computed.partials), read.computed.used, read.computed.pace) == ([], b"", None)
    assert not len(read.computed.indices)


def test_totals_are_the_same_for_every_number_of_members() -> None:
    generator = np.random.default_rng(0)
    leaves = [PartialSums({"loss": float(generator.normal() * 10.0**k)}) for k in range(11)]
    expected = fold_leaves(Interval(0, 11), leaves.__getitem__)
    for size in range(1, 14):
        held = [pieces(11, part) for part in ranges(11, size)]
        computed = [
            ComputedShards([fold_leaves(piece, leaves.__getitem__) for piece in mine], np.array([rank]))
            for rank, mine in enumerate(held)
        ]
        totals = Totals.of(computed, held, 11, lambda left, right: left)
        assert totals.scalars == expected.scalars
        assert totals.indices.tolist() == list(range(size))
