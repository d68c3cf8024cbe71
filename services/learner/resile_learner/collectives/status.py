"""What a member says about itself in the header of every round, so that all members conclude the same from it."""

import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .segments import NAME_BYTES, TOKEN_BYTES

_RATE_BITS = 3
"""Leading bits of a rate that its code keeps, besides its number of bits: the rate is known to one part in eight."""
_STATUS = struct.Struct(f"<8s8s{NAME_BYTES}s{TOKEN_BYTES}s2s8s8s")


class Host(NamedTuple):
    """Where a process runs: those with the same kernel and network namespace can pass each other descriptors."""

    kernel: bytes
    network: bytes


NOWHERE = Host(bytes(8), bytes(8))
NO_RACK = bytes(8)
NO_DIGEST = bytes(8)
NO_TOKEN = bytes(TOKEN_BYTES)


def find_host() -> Host:
    """Return where this process runs; `NOWHERE` if the system does not say."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return NOWHERE
    return Host(_digest(kernel), _digest(b"%d %d" % (network.st_dev, network.st_ino)))


def rack_of(location: Sequence[str]) -> bytes:
    """Return the identifier of a rack in a status, from the values of the labels that say where a host is."""
    return _digest(repr(tuple(location)).encode()) if any(location) else NO_RACK


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()[:8]


class Status(NamedTuple):
    """What a member says about itself in every header."""

    host: Host
    name: bytes
    """Name of the member's mailbox; zeros while it has none."""
    token: bytes
    """Token of the member's segment; zeros while it has none, or while non-members may still read it."""
    mapped: frozenset[int]
    """The ranks whose segments the member has mapped, of this or an earlier generation."""
    rate: int = 0
    """Bytes per second that its links to other hosts of its rack carry together; 0 if there are none, or if unknown."""
    rack: bytes = NO_RACK
    """The rack of the member's host."""
    far_rate: int = 0
    """Bytes per second that its links to other racks carry together; 0 if there are none, or if unknown."""
    digest: bytes = NO_DIGEST
    """Digest of the tokens of the segments that the member has mapped."""

    def encode(self, num_ranks: int) -> bytes:
        """Encode as bytes, whose number depends on ``num_ranks`` alone."""
        mapped = sum(1 << rank for rank in self.mapped).to_bytes(-(-num_ranks // 8), "little")
        rates = bytes(map(_encode_rate, (self.rate, self.far_rate)))
        return _STATUS.pack(*self.host, self.name, self.token, rates, self.rack, self.digest) + mapped


def status_bytes(num_ranks: int) -> int:
    """The length of an encoded status."""
    return _STATUS.size + -(-num_ranks // 8)


def decode_status(data: bytes) -> Status:
    """The inverse of ``Status.encode``."""
    kernel, network, name, token, rates, rack, digest = _STATUS.unpack_from(data)
    bits = int.from_bytes(data[_STATUS.size :], "little")
    mapped = frozenset(rank for rank in range(8 * (len(data) - _STATUS.size)) if bits >> rank & 1)
    rate, far_rate = map(_decode_rate, rates)
    return Status(Host(kernel, network), name, token, mapped, rate, rack, far_rate, digest)


def segments_digest(tokens: Mapping[int, bytes]) -> bytes:
    """A digest of which segments of which ranks are mapped."""
    if not tokens:
        return NO_DIGEST
    content = b"".join(rank.to_bytes(4) + token for rank, token in sorted(tokens.items()))
    return hashlib.sha256(content).digest()[: len(NO_DIGEST)]


def mapped_now(statuses: Sequence[Status]) -> list[frozenset[int]]:
    """[rank]: the ranks whose segments it has mapped, if they are those that these ranks name now."""
    named = {rank: status.token for rank, status in enumerate(statuses) if status.token != NO_TOKEN}
    return [
        status.mapped
        if status.mapped <= named.keys()
        and status.digest == segments_digest({rank: named[rank] for rank in status.mapped})
        else frozenset()
        for status in statuses
    ]


def _encode_rate(rate: int) -> int:
    """Encode in a byte: the number of bits, and the two bits after the first."""
    num_bits = rate.bit_length()
    return min(255, num_bits << 2 | rate >> num_bits - _RATE_BITS & 3) if num_bits > _RATE_BITS else 0


def _decode_rate(code: int) -> int:
    """The middle of the rates with this code."""
    num_bits, rest = divmod(code, 4)
    return (9 + 2 * rest) << num_bits - _RATE_BITS - 1 if num_bits > _RATE_BITS else 0
