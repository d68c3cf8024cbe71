"""Requests to replicas and their replies keep their content over the bus and over a connection, within bounds."""

import asyncio
import struct

import pytest

from resile_shared.calls import (
    MAX_CALL_BYTES,
    MAX_HEAD_BYTES,
    BadFrame,
    CallHead,
    ReplyHead,
    frame,
    read_frame,
)


def reading(*pieces: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    return reader


def test_a_request_on_the_bus_is_what_was_sent() -> None:
    for may_wait in (True, False):
        head = CallHead(method="predict", seconds=29.123456, may_wait=may_wait)
        assert CallHead.of(head.headers(), number=7) == head.model_copy(update={"number": 7})


def test_a_reply_on_the_bus_is_what_was_sent() -> None:
    for head in (ReplyHead(status="ok"), ReplyHead(status="lost", is_idempotent=True)):
        assert ReplyHead.of(head.headers()) == head


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {"resile-method": "predict"},
        {"resile-method": "predict", "resile-seconds": "soon"},
        {"resile-method": "predict", "resile-seconds": "inf"},
        {"resile-method": "x" * 201, "resile-seconds": "1.0"},
    ],
)
def test_a_request_that_nobody_sends_is_refused(headers: dict[str, str] | None) -> None:
    with pytest.raises(BadFrame, match="not a request to a replica"):
        CallHead.of(headers, number=1)


def test_a_reply_that_no_replica_sends_is_refused() -> None:
    with pytest.raises(BadFrame, match="not a reply of a replica"):
        ReplyHead.of({"resile-status": "fine"})


async def test_frames_follow_each_other_to_the_end() -> None:
    sent = [(ReplyHead(number=number, status="ok"), bytes(number)) for number in range(3)]
    reader = reading(*(frame(head, body) for head, body in sent))
    for head, body in sent:
        found = await read_frame(reader)
        assert found is not None
        assert (ReplyHead.model_validate_json(found[0]), found[1]) == (head, body)
    assert await read_frame(reader) is None


async def test_a_frame_that_is_cut_off_is_the_end() -> None:
    whole = frame(ReplyHead(status="ok"), b"result")
    for length in range(len(whole)):
        assert await read_frame(reading(whole[:length])) is None


@pytest.mark.parametrize("lengths", [(MAX_HEAD_BYTES + 1, 0), (0, MAX_CALL_BYTES + 1), (0xFFFFFFFF, 0xFFFFFFFF)])
async def test_a_frame_that_is_too_long_is_refused_before_it_is_read(lengths: tuple[int, int]) -> None:
    with pytest.raises(BadFrame, match="a frame of"):
        await read_frame(reading(struct.pack(">II", *lengths)))
