import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.collectives.frames import (
    HEADER_BYTES,
    MAX_REASON_BYTES,
    ROUND_PAYLOAD_BYTES,
    Frame,
    Kind,
    Malformed,
    decode,
    decode_abort,
    decode_skeleton,
    encode,
    encode_abort,
    encode_skeleton,
    encode_tag,
)
from resile_learner.collectives.spec import Tag

wide = st.integers(0, 2**64 - 1)
narrow = st.integers(0, 2**32 - 1)
tags = st.builds(Tag, generation=wide, round=wide)


@settings(deadline=None)
@given(st.sampled_from([Kind.PIECES, Kind.SUM]), tags, narrow, narrow, st.integers(0, ROUND_PAYLOAD_BYTES))
def test_a_header_is_read_as_it_was_written(kind: Kind, tag: Tag, bucket: int, block: int, length: int) -> None:
    header = encode(kind, tag, bucket=bucket, block=block, length=length)
    assert len(header) == HEADER_BYTES
    assert decode(header) == Frame(kind, tag, bucket, block, length)


@settings(deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_valid_header_or_malformed(header: bytes) -> None:
    try:
        frame = decode(header)
    except Malformed:
        return
    assert encode(frame.kind, frame.tag, bucket=frame.bucket, block=frame.block, length=frame.length)


@pytest.mark.parametrize("kind", list(Kind))
def test_no_kind_of_frame_may_be_of_any_length(kind: Kind) -> None:
    with pytest.raises(Malformed, match=kind.name):
        decode(encode(kind, Tag(1, 2), length=2**40))


def test_an_unknown_kind_is_malformed() -> None:
    header = bytearray(encode(Kind.SUM, Tag(1, 2)))
    header[len(encode_tag(Tag(1, 2))) + 2] = 99
    with pytest.raises(Malformed, match="not a frame"):
        decode(header)


@settings(deadline=None)
@given(tags, wide, st.text())
def test_an_abort_names_its_suspect_and_the_reason(tag: Tag, suspect: int, reason: str) -> None:
    frame = encode_abort(tag, suspect=suspect, reason=reason.encode(errors="ignore").decode())
    header = decode(frame[:HEADER_BYTES])
    assert (header.kind, header.tag, header.length) == (Kind.ABORT, tag, len(frame) - HEADER_BYTES)
    assert decode_abort(frame[HEADER_BYTES:]) == (suspect, reason.encode(errors="ignore").decode())


def test_a_reason_too_long_is_cut_so_that_it_is_still_accepted() -> None:
    frame = encode_abort(Tag(1, 2), suspect=4, reason="ä" * MAX_REASON_BYTES)
    decode(frame[:HEADER_BYTES])
    suspect, reason = decode_abort(frame[HEADER_BYTES:])
    assert suspect == 4
    assert reason.startswith("äää")


def test_an_abort_that_names_nobody_is_malformed() -> None:
    with pytest.raises(Malformed):
        decode_abort(b"")


@settings(deadline=None)
@given(tags, wide, st.binary(), st.lists(st.lists(st.integers(0, 1 << 32))))
def test_a_skeleton_announces_the_bytes_that_follow_it(
    tag: Tag, num_bytes: int, skeleton: bytes, groups: list[list[int]]
) -> None:
    frame = encode_skeleton(tag, num_bytes=num_bytes, skeleton=skeleton, groups=groups)
    assert decode(frame[:HEADER_BYTES]).kind is Kind.SKELETON
    assert decode_skeleton(frame[HEADER_BYTES:]) == (num_bytes, groups, skeleton)


@pytest.mark.parametrize("payload", [b"1234", bytes(16), bytes(8) + b"\1" + bytes(7) + b"7"])
def test_a_skeleton_that_announces_nothing_is_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed):
        decode_skeleton(payload)
