"""Frames, the unit of transmission on a data link: a fixed header and a payload of ``length`` bytes.

A header has two halves: the tag of a round, and the content of the frame. In a round all frames share the first half,
and the second halves are known before it begins, so that they are encoded once and compared as bytes.

| kind     | bucket, block          | payload                                             |
|----------|------------------------|-----------------------------------------------------|
| PIECES   | of the round           | the sender's partial sums of one block, concatenated |
| SUM      | of the round           | one finished block                                  |
| HEADER   | block: how many follow | the header of the sender's training loop, or a part |
| ABORT    |                        | the suspect's id and the reason                     |
| CONFIRM  |                        | nothing: the round of this tag is committed         |
| SKELETON |                        | the bytes of state to come, the sender's groups, and |
|          |                        | the description of the state                        |
| STATE    | block: running number  | the next bytes of state                             |
| STAGED   | of the receiver's part | nothing: the pieces lie in the sender's segment     |
| FOLDED   | of the sender's part   | nothing: the sum lies in the sender's segment       |
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import orjson

from resile_shared.errors import ResileError

from ..state.flat import MAX_SKELETON_BYTES
from .spec import Tag

ROUND_PAYLOAD_BYTES = 2 * 65_483 // 64 * 64 - 64
"""Maximum payload of a frame of a round: with its header it takes two segments on loopback, without a tiny third."""
STATE_FRAME_BYTES = 1 << 20
MAX_HEADER_FRAME_BYTES = 1 << 24
MAX_HEADER_BYTES = 1 << 32
"""The maximum size of a header, in as many frames as it takes: only what no training loop sends is beyond it."""
MAX_REASON_BYTES = 1 << 12

_TAG = struct.Struct("<QQ")
_CONTENT = struct.Struct("<HBxIIQ")
_ABORT = struct.Struct("<Q")
_STATE_TOTAL = struct.Struct("<QQ")
_MAGIC = 0x5E51
HEADER_BYTES = _TAG.size + _CONTENT.size
WorkerGroups = Sequence[Sequence[int]]
"""The ids of workers that share memory with each other; workers that share memory with no other are left out."""


class Kind(IntEnum):
    """What a frame carries."""

    PIECES = 1
    SUM = 2
    HEADER = 3
    ABORT = 4
    CONFIRM = 5
    SKELETON = 6
    STATE = 7
    STAGED = 8
    FOLDED = 9


_KINDS = {int(kind): kind for kind in Kind}
_MAX_LENGTH = {
    Kind.PIECES: ROUND_PAYLOAD_BYTES,
    Kind.SUM: ROUND_PAYLOAD_BYTES,
    Kind.HEADER: MAX_HEADER_FRAME_BYTES,
    Kind.ABORT: _ABORT.size + MAX_REASON_BYTES,
    Kind.CONFIRM: 0,
    Kind.SKELETON: _STATE_TOTAL.size + MAX_SKELETON_BYTES,
    Kind.STATE: STATE_FRAME_BYTES,
    Kind.STAGED: 0,
    Kind.FOLDED: 0,
}


class Malformed(ResileError):
    """A peer sent bytes that are not valid here."""


class Frame(NamedTuple):
    """The header of a frame."""

    kind: Kind
    tag: Tag
    bucket: int
    block: int
    length: int


class Announcement(NamedTuple):
    """What a SKELETON frame announces."""

    num_bytes: int
    """Size in bytes of the state that follows."""
    groups: WorkerGroups
    skeleton: bytes
    """The description of the state."""


def encode_tag(tag: Tag) -> bytes:
    """The first half of a header."""
    return _TAG.pack(*tag)


def encode_content(kind: Kind, *, bucket: int = 0, block: int = 0, length: int = 0) -> bytes:
    """The second half of a header."""
    return _CONTENT.pack(_MAGIC, kind, bucket, block, length)


def encode(kind: Kind, tag: Tag, *, bucket: int = 0, block: int = 0, length: int = 0) -> bytes:
    """A whole header."""
    return encode_tag(tag) + encode_content(kind, bucket=bucket, block=block, length=length)


def decode(header: bytes | bytearray) -> Frame:
    """The inverse of ``encode``. Raises Malformed for an unknown kind or a length that its kind cannot have."""
    magic, number, bucket, block, length = _CONTENT.unpack_from(header, _TAG.size)
    kind = _KINDS.get(number)
    if magic != _MAGIC or kind is None:
        raise Malformed(f"not a frame: its header is {bytes(header).hex()}")
    if length > _MAX_LENGTH[kind]:
        raise Malformed(f"a {kind.name} frame of {length} bytes, at most {_MAX_LENGTH[kind]} are allowed")
    return Frame(kind, Tag(*_TAG.unpack_from(header)), bucket, block, length)


def encode_header(tag: Tag, content: bytes) -> bytes:
    """The HEADER frames that carry ``content``."""
    size = MAX_HEADER_FRAME_BYTES
    parts = [content[start : start + size] for start in range(0, len(content), size)] or [b""]
    heads = [
        encode(Kind.HEADER, tag, block=left, length=len(part))
        for left, part in zip(reversed(range(len(parts))), parts, strict=True)
    ]
    return b"".join(piece for pair in zip(heads, parts, strict=True) for piece in pair)


def encode_abort(tag: Tag, *, suspect: int, reason: str) -> bytes:
    """A whole ABORT frame."""
    payload = _ABORT.pack(suspect) + reason.encode()[:MAX_REASON_BYTES]
    return encode(Kind.ABORT, tag, length=len(payload)) + payload


def decode_abort(payload: bytes | bytearray) -> tuple[int, str]:
    """The suspect and the reason of an ABORT frame's payload."""
    if len(payload) < _ABORT.size:
        raise Malformed(f"an ABORT frame of {len(payload)} bytes names nobody")
    (suspect,) = _ABORT.unpack_from(payload)
    return suspect, bytes(payload[_ABORT.size :]).decode(errors="replace")


def encode_skeleton(tag: Tag, *, num_bytes: int, skeleton: bytes, groups: WorkerGroups = ()) -> bytes:
    """A whole SKELETON frame, to be followed by ``num_bytes`` bytes of state."""
    encoded = orjson.dumps(groups)
    payload = _STATE_TOTAL.pack(num_bytes, len(encoded)) + encoded + skeleton
    return encode(Kind.SKELETON, tag, length=len(payload)) + payload


def decode_skeleton(payload: bytes | bytearray) -> Announcement:
    """The inverse of ``encode_skeleton``. Raises Malformed."""
    start = _STATE_TOTAL.size
    if len(payload) < start:
        raise Malformed(f"a SKELETON frame of {len(payload)} bytes announces nothing")
    num_bytes, length = _STATE_TOTAL.unpack_from(payload)
    try:
        groups = [[int(worker) for worker in group] for group in orjson.loads(payload[start : start + length])]
    except (TypeError, ValueError) as error:
        raise Malformed("a SKELETON frame names no groups of workers") from error
    return Announcement(num_bytes, groups, bytes(payload[start + length :]))
