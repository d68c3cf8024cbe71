"""Digests of a model, of a dataset, and of the parameters after each update, to compare workers."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..state.memory import ByteStream, byte_view, dtype_name, in_memory_order, tensor_bytes
from .seeds import seed_all, seeded

_COPY_BYTES = 16 * 2**20  # how much is copied from an accelerator at once
_WINDOW_BYTES = 16 * 2**10
_EXACT_BYTES = 64 * 2**10
_WORD_BYTES = 8


class Dataset(Protocol):
    """A map-style dataset: samples by index."""

    def __len__(self) -> int:
        """Count the samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Fetch one sample."""


def params_sha256(model: nn.Module | Mapping[str, Any]) -> str:
    r"""Compute the sha256, in hex, of a model's parameters and buffers: of ``model.state_dict()``.

    It is taken over these bytes, for each tensor in the order of the names (compared as strings)::

        name in UTF-8, b"\0", dtype, b"\0", sizes joined by ",", b"\0", data

    with dtype as PyTorch prints it (``float32``, ``bfloat16``, ``int64``), no sizes for a 0-dim tensor, and data the
    elements in row-major order whatever their order in memory, little-endian (a bool is one byte). To compute it again
    from a dict of numpy arrays::

        for name in sorted(arrays):
            shape = ",".join(map(str, arrays[name].shape))
            sha.update(f"{name}\0{arrays[name].dtype}\0{shape}\0".encode() + arrays[name].tobytes())

    Entries that are not tensors (a module's extra state) are left out. A tensor known by two names counts under both.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    sha = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if isinstance(tensor, Tensor):
            shape = ",".join(map(str, tensor.shape))
            sha.update(f"{name}\0{dtype_name(tensor.dtype)}\0{shape}\0".encode())
            for chunk in _row_major_chunks(tensor):
                sha.update(chunk)
    return sha.hexdigest()


def dataset_digest(dataset: Dataset, num_probes: int = 16) -> str:
    """Compute a sha256, in hex, of the dataset's length and of the first, the last and some other samples.

    Which ones depends on the length alone. Each is fetched with the generators of python, numpy and torch seeded by its
    index, so that random augmentation gives the same digest everywhere; the caller's random state stays as it was.
    Tensors, arrays, images and plain values count with their content, other objects with their type only. Raises what
    the dataset raises.
    """
    length = len(dataset)
    sha = hashlib.sha256(b"length %d;" % length)
    with seeded(0):
        for index in _probes(length, num_probes):
            seed_all(index)
            sample = dataset[index]
            sha.update(b"sample %d;" % index)
            for chunk in _content(sample):
                sha.update(chunk)
    return sha.hexdigest()


def content_digest(value: Any) -> str:
    """Compute a sha256, in hex, of a batch or a sample; what counts with its content is as in `dataset_digest`."""
    sha = hashlib.sha256()
    for chunk in _content(value):
        sha.update(chunk)
    return sha.hexdigest()


def state_digest(state: Any) -> str:
    """Compute a sha256, in hex, of what a ``state_dict()`` returned, to compare workers at rare iterations.

    The order of keys does not count. A tensor larger than 64 KiB is added up on its device: see `bits_of`.
    """
    sha = hashlib.sha256()
    for chunk in _state_content(state):
        sha.update(chunk)
    return sha.hexdigest()


def bits_of(tensor: Tensor | None) -> Tensor:
    """Add up the memory of a tensor, as 64-bit integers: in one pass, without waiting for a device.

    A change of a single element always changes it, by whatever way it is made. It compares tensors of the same dtype,
    shape and layout. The result for None and for a sparse tensor is 0.
    """
    if tensor is None or tensor.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    memory = byte_view(in_memory_order(plain)[1])
    if memory.storage_offset() % _WORD_BYTES:
        memory = memory.clone()
    num_words = len(memory) // _WORD_BYTES
    words, rest = memory[: num_words * _WORD_BYTES], memory[num_words * _WORD_BYTES :]
    return words.view(torch.int64).sum() + rest.sum()


class RollingDigest:
    """A cheap check that workers hold the same tensors: each round it hashes the next window of at most 16 KiB.

    It compares workers whose tensors have the same dtypes, shapes and layouts. Tensors with gaps are left out.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses: list[int] | None = None
        self._stream = ByteStream[Tensor]([])
        self._host_stream: ByteStream[memoryview] | None = None

    def at(self, number: int) -> int:
        """Return the 64-bit digest, for round ``number``, of what the tensors hold now."""
        # An optimizer may give a parameter new memory (``p.data = ...``) instead of writing into the old.
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            self._view_memory()
            self._addresses = addresses
        num_windows = -(-self._stream.num_bytes // _WINDOW_BYTES) or 1
        start = number % num_windows * _WINDOW_BYTES
        if self._host_stream is not None:
            window = b"".join(self._host_stream.cut(start, start + _WINDOW_BYTES))
        else:
            window = b"".join(tensor_bytes(view.cpu()) for view in self._stream.cut(start, start + _WINDOW_BYTES))
        return zlib.crc32(window) << 32 | zlib.adler32(window)

    def _view_memory(self) -> None:
        in_order = [(tensor, in_memory_order(tensor)[1]) for tensor in self._tensors]
        views = [byte_view(dense) for tensor, dense in in_order if dense.data_ptr() == tensor.data_ptr()]
        self._stream = ByteStream(views)
        on_host = all(view.device.type == "cpu" for view in views)
        self._host_stream = ByteStream(view.numpy().data for view in views) if on_host else None


def _row_major_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the elements as little-endian bytes, copying from an accelerator piece by piece."""
    plain = byte_view(tensor.detach().resolve_conj().resolve_neg().contiguous())
    for chunk in torch.split(plain, _COPY_BYTES) if plain.device.type != "cpu" else (plain,):
        yield tensor_bytes(chunk.cpu())


def _probes(length: int, num_probes: int) -> list[int]:
    """Choose which samples to hash: the first, the last, and others as sha256 spreads them."""
    if length <= num_probes:
        return list(range(length))
    hashes = (hashlib.sha256(b"probe %d" % k).digest() for k in range(num_probes - 2))
    spread = (int.from_bytes(digest[:8], "little") % length for digest in hashes)
    return sorted({0, length - 1, *spread})


def _content(value: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that distinguish samples: for each value its kind, its size and its content."""
    if isinstance(value, Mapping):
        yield b"dict %d;" % len(value)
        for key, item in value.items():
            yield from _content(key)
            yield from _content(item)
    elif isinstance(value, list | tuple):
        yield b"%s %d;" % (b"tuple" if isinstance(value, tuple) else b"list", len(value))
        for item in value:
            yield from _content(item)
    elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        yield f"tensor {dtype_name(value.dtype)} {tuple(value.shape)};".encode()
        yield from _row_major_chunks(value)
    elif isinstance(value, str | bytes):
        content = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        yield b"%s %d;" % (b"str" if isinstance(value, str) else b"bytes", len(content))
        yield content
    elif value is None or isinstance(value, bool | int | float | complex):
        yield f"{type(value).__name__} {value!r};".encode()
    else:
        yield from _array_content(value)


def _state_content(state: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that distinguish states: see `state_digest`."""
    if isinstance(state, Mapping):
        yield b"dict %d;" % len(state)
        for key in sorted(state, key=repr):
            yield from _content(key)
            yield from _state_content(state[key])
    elif isinstance(state, list | tuple):
        yield b"%s %d;" % (b"tuple" if isinstance(state, tuple) else b"list", len(state))
        for item in state:
            yield from _state_content(item)
    elif isinstance(state, Tensor) and state.nbytes > _EXACT_BYTES:
        yield f"tensor {dtype_name(state.dtype)} {tuple(state.shape)} {int(bits_of(state))};".encode()
    else:
        yield from _content(state)


def _array_content(value: Any) -> Iterator[bytes]:
    """Yield the content of an array or of what converts itself to one (an image), else only the value's type."""
    yield f"{type(value).__module__}.{type(value).__qualname__};".encode()
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        with suppress(TypeError, ValueError, RuntimeError):  # a sparse tensor has the attribute, and raises
            array = np.asarray(value)
            if not array.dtype.hasobject:
                yield f"{array.dtype.str} {array.shape};".encode() + array.tobytes()
