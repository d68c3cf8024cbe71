"""Copies through two buffers: the bytes are those of the tensors, whether the device copies early or late."""

from contextlib import closing

import pytest
import torch
from torch import Tensor

from resile_learner.state.pinned_copies import HostReader, HostWriter, side_stream

from .copy_streams import FakeStream, staged_by

CHUNK_BYTES = 64
SIZES = [[64], [1, 63], [], [10, 20, 30], [5], [64]]
"""Of the tensors in each chunk."""


def chunks(seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for n in sizes] for sizes in SIZES]


def values(chunk: list[Tensor]) -> list[list[int]]:
    return [tensor.tolist() for tensor in chunk]


@pytest.fixture(params=[False, True], ids=["early", "late"])
def stream(request: pytest.FixtureRequest) -> FakeStream:
    return FakeStream(late=request.param)


def test_each_chunk_has_its_bytes_while_it_is_used(stream: FakeStream) -> None:
    expected = chunks(0)
    reader = HostReader(CHUNK_BYTES, staged_by(stream))
    for chunk, memory in zip(expected, reader.read(chunks(0)), strict=True):
        assert values(memory) == values(chunk)


def test_while_a_chunk_is_used_the_next_one_is_copied_and_not_waited_for() -> None:
    stream = FakeStream(late=True)
    reading = HostReader(CHUNK_BYTES, staged_by(stream)).read(chunk for chunk in chunks(0) if chunk)
    seen = [(stream.num_started, stream.num_done) for _ in reading]
    assert seen == [(2, 1), (3, 2), (4, 3), (5, 4), (5, 5)]


def test_two_buffers_of_one_chunk_are_all_the_memory(stream: FakeStream) -> None:
    for _ in HostReader(CHUNK_BYTES, staged_by(stream)).read(chunks(0)):
        pass
    assert [len(buffer) for buffer in stream.buffers] == [CHUNK_BYTES] * 2


def test_no_device_reads_the_tensors_after_the_iterator_was_closed() -> None:
    stream = FakeStream(late=True)
    with closing(HostReader(CHUNK_BYTES, staged_by(stream)).read(chunks(0))) as reading:
        next(reading)
        assert stream.num_done < stream.num_started
    assert stream.num_done == stream.num_started == 2


def test_tensors_on_the_host_are_used_as_they_are() -> None:
    given = chunks(0)
    read = list(HostReader(CHUNK_BYTES).read(given))
    writer = HostWriter(CHUNK_BYTES)
    for chunk, memory in zip(given, read, strict=True):
        assert [tensor.data_ptr() for tensor in memory] == [tensor.data_ptr() for tensor in chunk]
        assert [tensor.data_ptr() for tensor in writer.allocate(chunk)] == [tensor.data_ptr() for tensor in chunk]
        writer.write()
    assert side_stream(torch.device("cpu")) is None


def test_what_is_received_is_written_although_the_buffers_are_filled_again(stream: FakeStream) -> None:
    expected = chunks(1)
    targets = [[torch.zeros_like(tensor) for tensor in chunk] for chunk in expected]
    writer = HostWriter(CHUNK_BYTES, staged_by(stream))
    for chunk, received in zip(targets, expected, strict=True):
        for memory, content in zip(writer.allocate(chunk), received, strict=True):
            memory.copy_(content)
        writer.write()
    writer.finish()
    assert [values(chunk) for chunk in targets] == [values(chunk) for chunk in expected]
    assert [len(buffer) for buffer in stream.buffers] == [CHUNK_BYTES] * 2


def test_a_chunk_is_written_while_the_next_one_is_received() -> None:
    stream = FakeStream(late=True)
    writer = HostWriter(CHUNK_BYTES, staged_by(stream))
    seen = []
    for chunk in [chunk for chunk in chunks(1) if chunk]:
        writer.allocate(chunk)
        seen.append((stream.num_started, stream.num_done))
        writer.write()
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]


def test_a_chunk_that_was_not_received_whole_is_not_written() -> None:
    stream = FakeStream(late=False)
    writer = HostWriter(CHUNK_BYTES, staged_by(stream))
    torn, whole = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    writer.allocate([torn])[0].fill_(1)
    writer.allocate([whole])[0].fill_(2)
    writer.write()
    writer.finish()
    assert (torn.tolist(), whole.tolist()) == ([0] * 4, [2] * 4)
