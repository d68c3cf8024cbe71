"""Memory that the workers of one host share: segments without a name, and how their descriptors travel.

A segment belongs to the worker that made it. Nobody else can write to it, since it is sealed before its descriptor is
sent, and nobody can change its size. It is gone when the last process that maps it has ended or dropped it.
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
from collections.abc import Iterable
from contextlib import suppress

import torch

from ..state.memory import tensor_bytes
from .memory import Array, array_of

NAME_BYTES = 16
_GENERATION_BYTES = 8
TOKEN_BYTES = _GENERATION_BYTES + 16
MAX_PENDING = 256
_SEALED = 0x0001 | 0x0002 | 0x0004 | 0x0010
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE of linux/fcntl.h."""
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_MFD_NOEXEC_SEAL = 0x0008
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """Mapped memory, as arrays of any dtype, which are valid as long as the segment. Children of this process lack it.

    No descriptor stays open, as one would with Python's ``mmap``.
    """

    def __init__(self, fd: int, num_bytes: int, *, protection: int) -> None:
        self.num_bytes = num_bytes
        address = _LIBC.mmap(None, num_bytes, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        weakref.finalize(self, _unmap, address, num_bytes, os.getpid()).atexit = False
        _LIBC.madvise(address, num_bytes, mmap.MADV_DONTFORK)
        self._bytes = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
        self._memory = tensor_bytes(self._bytes)
        self._arrays: dict[torch.dtype, Array] = {}

    def bytes_at(self, offset: int, num_bytes: int) -> memoryview:
        """Some of it, to send."""
        return self._memory[offset : offset + num_bytes]

    def array_at(self, offset: int, num_elements: int, dtype: torch.dtype) -> Array:
        """Some of it, to copy or to add; ``offset`` is in bytes, and a multiple of the size of an element."""
        array = self._arrays.get(dtype)
        if array is None:
            array = self._arrays[dtype] = array_of(self._bytes.view(dtype))
        first = offset // dtype.itemsize
        return array[first : first + num_elements]


def create_segment(num_bytes: int) -> tuple[Segment, int]:
    """Make a segment of ``num_bytes``, a multiple of 64, with all its memory allocated; return it and its descriptor.

    Raises OSError: the system forbids it, or has no memory for it.
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


def map_segment(fd: int, num_bytes: int) -> Segment:
    """Map the segment of another worker, to read it. Raises OSError if it is not what `create_segment` makes."""
    if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALED != _SEALED or os.fstat(fd).st_size != num_bytes:
        raise OSError("the memory of another worker is not sealed, or has another size")
    return Segment(fd, num_bytes, protection=mmap.PROT_READ)


def make_token(generation: int) -> bytes:
    """Return what names a segment of ``generation``, and what nobody can guess; those of newer ones are greater."""
    return generation.to_bytes(_GENERATION_BYTES) + secrets.token_bytes(TOKEN_BYTES - _GENERATION_BYTES)


class Mailbox:
    """A socket in the abstract namespace, at which a worker receives the descriptors of segments.

    Anybody on the host can send to it, so a descriptor counts only with a token that its sender has proved to know.
    """

    def __init__(self) -> None:
        self.name = secrets.token_bytes(NAME_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._pending: dict[bytes, int | None] = {}
        """By token; None: this process has no room for the descriptor."""
        self._oldest = bytes(_GENERATION_BYTES)
        try:
            self._socket.setblocking(False)
            self._socket.bind(_address(self.name))
        except BaseException:
            self._socket.close()
            raise

    def send(self, name: bytes, token: bytes, fd: int) -> None:
        """Send ``fd`` to the mailbox called ``name``. Raises BlockingIOError when that is full, else OSError."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))
        self._socket.sendmsg([token], [rights], 0, _address(name))  # socket.send_fds ignores the address

    def take(self, token: bytes) -> int | None:
        """Return the descriptor that came with ``token``, None until it does; the caller closes it.

        Raises OSError if it came when this process could open no more.
        """
        self._receive()
        if token not in self._pending:
            return None
        fd = self._pending.pop(token)
        if fd is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return fd

    def drop_before(self, generation: int) -> None:
        """Close what older generations have left, also if it comes later."""
        self._oldest = generation.to_bytes(_GENERATION_BYTES)
        self._receive()
        stale = [token for token in self._pending if token < self._oldest]
        _close_all([self._pending.pop(token) for token in stale])

    def _receive(self) -> None:
        """Read what has come; of what nobody takes the oldest is closed."""
        for _ in range(MAX_PENDING):
            try:
                token, fds, flags, _ = socket.recv_fds(self._socket, TOKEN_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return
            has_no_room = not fds and bool(flags & socket.MSG_CTRUNC)
            is_valid = len(token) == TOKEN_BYTES and (len(fds) == 1 or has_no_room)
            if not is_valid or token < self._oldest or token in self._pending:
                _close_all(fds)
                continue
            self._pending[token] = None if has_no_room else fds[0]
            if len(self._pending) > MAX_PENDING:
                _close_all([self._pending.pop(next(iter(self._pending)))])

    def close(self) -> None:
        """Close the socket and what nobody has taken."""
        self._socket.close()
        _close_all(self._pending.values())
        self._pending.clear()


def _unmap(address: int, num_bytes: int, pid: int) -> None:
    if os.getpid() == pid:  # a child may have something else there
        _LIBC.munmap(address, num_bytes)


def _address(name: bytes) -> bytes:
    return b"\0resile/" + name


def _close_all(fds: Iterable[int | None]) -> None:
    for fd in fds:
        if fd is not None:
            with suppress(OSError):
                os.close(fd)
