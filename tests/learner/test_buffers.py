import torch
from torch import nn

from resile_learner.training.buffers import Buffers, add_deltas


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_every_shard_starts_from_the_committed_buffers_and_they_average_by_weight() -> None:
    model = nn.BatchNorm1d(3)
    buffers = Buffers(model)
    shards = [torch.randn(4, 3), torch.randn(8, 3)]
    alone = []
    for shard in shards:
        copy = nn.BatchNorm1d(3)
        copy(shard)
        alone.append(copy.running_mean)
    deltas = []
    for leaf, shard in enumerate(shards):
        buffers.restore()
        model(shard)
        assert torch.equal(model.running_mean, alone[leaf])  # type: ignore[arg-type]
        deltas.append(buffers.collect(weight=len(shard) / 12, first=leaf == 0))
    buffers.commit(add_deltas(deltas[0], deltas[1]))
    torch.testing.assert_close(model.running_mean, alone[0] * 4 / 12 + alone[1] * 8 / 12)  # type: ignore[operator]
    assert model.num_batches_tracked == 1


def test_constant_buffers_are_neither_sent_nor_changed() -> None:
    class Masked(nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mask

    model = Masked()
    before = statistics(model)
    buffers = Buffers(model)
    model(torch.zeros(2, 2))
    deltas = buffers.collect(weight=0.1, first=True)
    assert deltas == {}
    buffers.commit(deltas)
    assert torch.equal(model.mask, before["mask"])


def test_a_member_without_shards_gets_the_same_buffers_as_the_others() -> None:
    here, there = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    mine, theirs = Buffers(here), Buffers(there)
    here(torch.randn(5, 2))
    deltas = mine.collect(weight=1.0, first=True)
    mine.commit(deltas)
    theirs.commit(deltas)
    for name, buffer in statistics(here).items():
        assert torch.equal(buffer, statistics(there)[name])


def test_what_a_body_changes_after_its_loss_does_not_reach_the_next_shard() -> None:
    norms = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    buffers = Buffers(norms)
    buffers.restore()
    norms[0](torch.randn(4, 2))
    buffers.collect(weight=1.0, first=True)
    norms[1](torch.randn(4, 2))
    buffers.restore()
    assert not buffers.collect(weight=1.0, first=False)
    assert torch.equal(norms[1].running_mean, torch.zeros(2))
