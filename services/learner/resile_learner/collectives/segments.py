"""Memory that the workers of one host share: segments without a name, and how their descriptors travel.

A segment belongs to the worker that made it. Nobody else can write to it, since it is sealed before its descriptor is
sent, and nobody can change its size. It is gone when the last process that maps it has ended or dropped it.

Its maker may write something else to it only when nobody reads it any more. Each reader therefore holds a lease: the
write end of a pipe, which comes with the descriptor and is closed after the mapping is gone. The maker then reads the
end of the stream. The kernel closes the lease of a reader that is killed, but only once the memory of that process is
gone; a reader that is frozen keeps its lease.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import socket
import weakref
from array import array
from collections.abc import Collection, Iterable
from contextlib import suppress
from multiprocessing.util import register_after_fork
from typing import NamedTuple

import torch

from ..state.memory import tensor_bytes
from .bucket_memory import Array, array_of

NAME_BYTES = 16
TOKEN_BYTES = 16
MAX_PENDING = 256
LEASES_PER_NEIGHBOR = 2
"""Descriptors that a worker keeps open for each worker that it shares memory with: the leases of both segments."""
_GENERATION_BYTES = 8
_MESSAGE_BYTES = _GENERATION_BYTES + TOKEN_BYTES
_SEALED = 0x0001 | 0x0002 | 0x0004 | 0x0010
"""The seals F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE of linux/fcntl.h."""
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_MFD_NOEXEC_SEAL = 0x0008
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """Mapped memory, as arrays of any dtype, valid as long as the segment. Forked children do not have it.

    No descriptor of the memory stays open, as one would with Python's ``mmap``. A ``lease`` is closed after the memory
    is unmapped; a worker process of a DataLoader, which would keep it open, closes it at once.
    """

    def __init__(self, fd: int, num_bytes: int, *, protection: int, lease: int | None = None) -> None:
        self.num_bytes = num_bytes
        address = _LIBC.mmap(None, num_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if lease is not None:
            register_after_fork(self, lambda _: os.close(lease))
        weakref.finalize(self, _unmap, address, num_bytes, os.getpid(), lease).atexit = False
        _LIBC.madvise(address, num_bytes, mmap.MADV_DONTFORK)
        self._address = address
        self._bytes = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
        self._memory = tensor_bytes(self._bytes)
        self._arrays: dict[torch.dtype, Array] = {}

    def bytes_at(self, offset: int, num_bytes: int) -> memoryview:
        """View a part of the memory as bytes, to send."""
        return self._memory[offset : offset + num_bytes]

    def populate(self, offset: int, num_bytes: int) -> None:
        """Map the pages of a part of the own memory now, and not each of them when it is first written to."""
        start = offset - offset % mmap.PAGESIZE
        most = min(offset + num_bytes, self.num_bytes) - start
        _LIBC.madvise(self._address + start, most, _MADV_POPULATE_WRITE)  # a kernel before 5.14 refuses

    def array_at(self, offset: int, num_elements: int, dtype: torch.dtype) -> Array:
        """View a part of the memory as an array; ``offset`` is in bytes, and a multiple of the size of an element."""
        array = self._arrays.get(dtype)
        if array is None:
            array = self._arrays[dtype] = array_of(self._bytes.view(dtype))
        first = offset // dtype.itemsize
        return array[first : first + num_elements]


def create_segment(num_bytes: int) -> tuple[Segment, int]:
    """Make a segment of ``num_bytes``, a multiple of 64, with all its memory allocated; return it and its descriptor.

    Raises OSError if the system forbids it, or has no memory for it.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("resile", flags | _MFD_NOEXEC_SEAL)
    except OSError:  # a kernel before 6.3
        fd = os.memfd_create("resile", flags)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)  # a later write to memory that is not there would end the process
        segment = Segment(fd, num_bytes, protection=mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALED)
    except BaseException:
        os.close(fd)
        raise
    return segment, fd


def map_segment(fd: int, num_bytes: int, lease: int | None = None) -> Segment:
    """Map the segment of another worker, to read it. Raises OSError if it is not what `create_segment` makes.

    The ``lease`` that came with it belongs to the segment from then on.
    """
    if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALED != _SEALED or os.fstat(fd).st_size != num_bytes:
        raise OSError("the memory of another worker is not sealed, or has another size")
    return Segment(fd, num_bytes, protection=mmap.PROT_READ, lease=lease)


class OwnSegment:
    """The segment that this worker has made, and the leases of those that it was sent to.

    Raises OSError if the system forbids it, or has no memory for it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.segment, self._fd = create_segment(num_bytes)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        """A name of the segment that nobody can guess."""
        self._leases: dict[int, int] = {}
        """The read end of the pipe of each lease, by worker."""

    def readers(self) -> set[int]:
        """The workers that may read it: they have mapped it, or its descriptor is on its way to them."""
        for worker, lease in list(self._leases.items()):
            if _has_ended(lease):
                os.close(self._leases.pop(worker))
        return set(self._leases)

    def send(self, mailbox: "Mailbox", name: bytes, *, worker: int, generation: int) -> None:
        """Send it to ``worker``, whose mailbox is ``name``. Raises BlockingIOError when that is full, else OSError."""
        lease, given = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mailbox.send(name, self.token, [self._fd, given], generation=generation)
        except BaseException:
            os.close(lease)
            raise
        finally:
            os.close(given)
        self._leases[worker] = lease

    def close(self) -> None:
        """Release it here; it stays as it is for those that read it."""
        _close_all([self._fd, *self._leases.values()])
        self._leases.clear()


class Received(NamedTuple):
    """The descriptors of a segment that has arrived at a mailbox."""

    memory: int
    lease: int


class _Pending(NamedTuple):
    """A segment that has arrived at a mailbox and has not been taken yet."""

    generation: int
    """The generation of the sender."""
    received: Received | None
    """The descriptors; None: this process could not open more."""


class Mailbox:
    """A socket in the abstract namespace, at which a worker receives the descriptors of segments.

    Anybody on the host can send to it, so a descriptor counts only with a token that its sender has proved to know.
    """

    def __init__(self) -> None:
        self.name = secrets.token_bytes(NAME_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._pending: dict[bytes, _Pending] = {}
        """What has arrived and has not been taken yet, by token."""
        self._oldest = 0
        try:
            self._socket.setblocking(False)
            self._socket.bind(_address(self.name))
        except BaseException:
            self._socket.close()
            raise

    def send(self, name: bytes, token: bytes, fds: Collection[int], *, generation: int) -> None:
        """Send descriptors to the mailbox called ``name``. Raises BlockingIOError when that is full, else OSError."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
        message = generation.to_bytes(_GENERATION_BYTES) + token
        self._socket.sendmsg([message], [rights], 0, _address(name))  # socket.send_fds ignores the address

    def take(self, token: bytes) -> Received | None:
        """Return what arrived with ``token``, None until it does; the caller closes both descriptors.

        Raises OSError if this process could not open more descriptors when it arrived.
        """
        self._receive()
        if token not in self._pending:
            return None
        received = self._pending.pop(token).received
        if received is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return received

    def drop_before(self, generation: int) -> None:
        """Close what was sent in older generations and has not been taken, even if it arrives later."""
        self._oldest = generation
        self._receive()
        for token in [token for token, each in self._pending.items() if each.generation < generation]:
            self._drop(token)

    def _receive(self) -> None:
        """Read what has arrived; if too much is not taken, the oldest is closed."""
        most = len(Received._fields)
        for _ in range(MAX_PENDING):
            try:
                message, fds, flags, _ = socket.recv_fds(
                    self._socket, _MESSAGE_BYTES + 1, most, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:
                return
            generation, token = int.from_bytes(message[:_GENERATION_BYTES]), message[_GENERATION_BYTES:]
            has_no_room = len(fds) < most and bool(flags & socket.MSG_CTRUNC)
            is_valid = len(message) == _MESSAGE_BYTES and (len(fds) == most or has_no_room)
            if not is_valid or generation < self._oldest:
                _close_all(fds)
                continue
            self._drop(token)
            if has_no_room:
                _close_all(fds)
            self._pending[token] = _Pending(generation, None if has_no_room else Received(*fds))
            if len(self._pending) > MAX_PENDING:
                self._drop(next(iter(self._pending)))

    def _drop(self, token: bytes) -> None:
        dropped = self._pending.pop(token, None)
        if dropped and dropped.received:
            _close_all(dropped.received)

    def close(self) -> None:
        """Close the socket and what has not been taken."""
        self._socket.close()
        for token in list(self._pending):
            self._drop(token)


def _unmap(address: int, num_bytes: int, pid: int, lease: int | None) -> None:
    if os.getpid() == pid:  # a child may have something else there
        _LIBC.munmap(address, num_bytes)
        if lease is not None:
            os.close(lease)


def _has_ended(lease: int) -> bool:
    try:
        return not os.read(lease, 1)
    except BlockingIOError:
        return False


def _address(name: bytes) -> bytes:
    return b"\0resile/" + name


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
