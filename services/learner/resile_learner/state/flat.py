"""State as data: a tree of plain values and tensors, flattened into a skeleton of JSON and a list of tensors.

A joining worker receives this form and a checkpoint stores it. Nothing in it is ever unpickled:
reading a state yields numbers, text, containers and tensors, never code.

The skeleton is one JSON object::

    {"format": 1,
     "tensors": [{"path": "model/conv1.weight", "dtype": "float32", "shape": [8, 1, 3, 3], "num_bytes": 288}, ...],
     "tree": <node>}

A node is ``null``, a boolean, a finite number, a string or an array (a list) as itself, or an object with one key that
says what it is: ``{"tensor": 0}``, ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ... (see ``_decoders``).
"""

import base64
import math
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import orjson
import torch
from torch import Tensor

from .memory import StateError, describe, dtype_name, dtype_named, in_memory_order

FORMAT = 1
MAX_SKELETON_BYTES = 1 << 28
_MAX_DEPTH = 64  # a level takes up to three of the 254 that orjson nests
_ARRAY_KINDS = "biufcmMSU"  # kinds of numpy dtype whose bytes are the whole value
# What bad input makes; numpy parses some dtypes as Python.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, SyntaxError, struct.error)
_STORABLE = (
    "None, booleans, numbers, strings, bytes, lists, tuples, dicts, dense tensors, numpy arrays of numbers or text, "
    "torch.Size, torch.dtype and torch.device"
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a skeleton, as its bytes lie in memory and in the stream."""

    path: str
    """Keys from the root, joined by "/", of the first use if there are several: ``model/conv1.weight``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    dims: tuple[int, ...] = ()
    """The dimension of the tree's tensor for each in ``shape``: () when in order, (0, 2, 3, 1) for channels_last."""
    strides: tuple[int, ...] = ()
    """Strides of the tree's tensor, if ``dims`` do not imply them: a dimension of one element may have any stride."""


Allocate = Callable[[bytes], Sequence[Tensor]]
"""Returns the tensors that the state with this skeleton is received or read into."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """A flattened state. Its tensors are the state's own memory, detached, not copies."""

    skeleton: bytes
    tensors: list[Tensor]
    """Dense and contiguous tensors, on any device."""


def flatten(tree: Any) -> FlatState:
    """Flatten ``tree`` without copying its tensors.

    Dicts keep their order; OrderedDict and defaultdict are read as dict. Tensors that are the same memory are stored
    once and come back as one tensor. Gradient history, devices, and whether a tensor is a Parameter are not stored.
    Raises StateError, naming the place, for anything that cannot be stored, and for a skeleton that is too large.
    """
    encoder = _Encoder()
    node = encoder.encode(tree, ())
    skeleton = orjson.dumps({"format": FORMAT, "tensors": encoder.specs, "tree": node})
    if len(skeleton) > MAX_SKELETON_BYTES:
        raise StateError(
            f"the state has {len(skeleton) >> 20} MiB beside its tensors, at most {MAX_SKELETON_BYTES >> 20} MiB can "
            f"be given to a worker that joins. The largest part is {_place(_largest(node))}: store many numbers in a "
            "tensor or a numpy array, and not in lists or dicts"
        )
    return FlatState(skeleton, encoder.tensors)


def specs(skeleton: bytes) -> list[TensorSpec]:
    """List the tensors of ``skeleton``, in the order of their bytes. Raises StateError if it is malformed."""
    return _parse(skeleton)[0]


def allocate(skeleton: bytes, targets: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """Allocate the tensors of ``skeleton``: one for each of ``specs(skeleton)``, on the CPU, contents undefined.

    Where ``targets`` has a tensor of the same dtype, shape and order of dimensions at a tensor's path, its memory is
    used, on whatever device, so that bytes received arrive in place. Every target is used at most once.
    """
    buffers: list[Tensor] = []
    used: set[tuple[torch.device, int]] = set()
    for spec in specs(skeleton):
        target = (targets or {}).get(spec.path)
        buffer = None if target is None else _memory_of(target, spec)
        if buffer is None or (buffer.device, buffer.data_ptr()) in used:
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        used.add((buffer.device, buffer.data_ptr()))
        buffers.append(buffer)
    return buffers


def is_equal(one: bytes, other: bytes, *, ignoring: str) -> bool:
    """Whether two skeletons are the same, except for what their trees (dicts) have under the key ``ignoring``.

    False for one that is malformed.
    """

    def compared(skeleton: bytes) -> bytes:
        document = orjson.loads(skeleton)
        document["tree"]["dict"] = [item for item in document["tree"]["dict"] if item[0] != ignoring]
        return orjson.dumps(document)

    try:
        return one == other or compared(one) == compared(other)
    except _MALFORMED:
        return False


def unflatten(skeleton: bytes, tensors: Sequence[Tensor]) -> Any:
    """Rebuild a state; the tree holds ``tensors`` themselves, and numpy arrays share their memory.

    Raises StateError if ``tensors`` are not those of the skeleton in number, dtype and shape, or it is malformed.
    """
    expected, node = _parse(skeleton)
    if len(tensors) != len(expected):
        raise StateError(f"a stored state has {len(expected)} tensors, but {len(tensors)} were given")
    for spec, tensor in zip(expected, tensors, strict=True):
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise StateError(
                f"the stored tensor {spec.path} is {spec.dtype} {list(spec.shape)}, "
                f"but {tensor.dtype} {list(tensor.shape)} was given"
            )
    in_order = [_in_tree(tensor, spec) for spec, tensor in zip(expected, tensors, strict=True)]
    try:
        return _Decoder(in_order).decode(node)
    except RecursionError:
        raise StateError("the stored state is not readable: it is nested too deeply") from None


class _Encoder:
    """Turns a tree into a node, collecting its tensors."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.specs: list[dict[str, Any]] = []
        self._index: dict[object, int] = {}
        self._sources: list[Tensor] = []  # keeps each id in _index from being given to another tensor

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > _MAX_DEPTH:
            raise StateError(f"{_place(path)} is nested deeper than {_MAX_DEPTH} levels, or contains itself")
        # Exact types: a subclass (an enum, a named tuple) would come back as something else.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _checked_text(value, path)
        if kind is int:
            return value if -(2**63) <= value < 2**64 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack("<d", value).hex()}
        if kind is list:
            return [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.encode(item, (*path, i)) for i, item in enumerate(value)]}
        if kind in (dict, OrderedDict, defaultdict):
            return {"dict": [[self._key(key, path), self.encode(item, (*path, key))] for key, item in value.items()]}
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, path)}
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        if type(value) is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.ndarray) and type(value) is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            return self._array(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return {"scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise StateError(
            f"{_place(path)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored; "
            f"a state is made of {_STORABLE}"
        )

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, Tensor):
            raise StateError(f"{_place(path)} has tensors as keys; of an optimizer, store its state_dict()")
        return self.encode(key, path)

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> int:
        _check_storable(tensor, path)
        index = self._index.get(id(tensor))
        if index is not None:
            return index
        plain = tensor.detach().resolve_conj().resolve_neg()
        where = (plain.data_ptr(), plain.dtype, plain.shape, plain.stride(), plain.device)
        # state_dict() makes a new object for each name of a tied parameter; only their memory is the same.
        index = self._index.get(where) if plain.numel() else None
        if index is None:
            index = self._add(plain, path)
            self._index[where] = index
        self._index[id(tensor)] = index
        self._sources.append(tensor)
        return index

    def _add(self, plain: Tensor, path: tuple[Any, ...]) -> int:
        dims, stored = in_memory_order(plain)
        spec: dict[str, Any] = {
            "path": "/".join(map(str, path)),
            "dtype": dtype_name(stored.dtype),
            "shape": list(stored.shape),
            "num_bytes": stored.numel() * stored.dtype.itemsize,
        }
        if dims:
            spec["dims"] = list(dims)
        if stored.data_ptr() == plain.data_ptr() and _implied_strides(stored.shape, dims) != plain.stride():
            spec["strides"] = list(plain.stride())
        self.specs.append(spec)
        self.tensors.append(stored)
        return len(self.tensors) - 1

    def _array(self, array: np.ndarray[Any, Any], path: tuple[Any, ...]) -> dict[str, Any]:
        plain = np.require(array, requirements=["C", "W"])
        content = torch.from_numpy(plain.reshape(-1).view(np.uint8))
        return {"array": [self._tensor(content, path), array.dtype.str, list(array.shape)]}


class _Decoder:
    """Turns a node back into a tree."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind, content = next(iter(node.items())) if len(node) == 1 else (str(sorted(node)), None)
        if kind not in self._decoders:
            raise StateError(f"the stored state is not readable: unknown kind of value {kind!r}")
        try:
            return self._decoders[kind](self, content)
        except _MALFORMED as error:
            raise StateError(f"the stored state is not readable: a bad {kind!r} ({error})") from error

    def _dict(self, pairs: Any) -> dict[Any, Any]:
        tree = {self.decode(key): self.decode(value) for key, value in pairs}
        if len(tree) != len(pairs):
            raise StateError("the stored state is not readable: a dict has a key twice")
        return tree

    # Of the class: in an instance they would be a cycle, which keeps the tensors until it is collected.
    _decoders: ClassVar[Mapping[str, Callable[["_Decoder", Any], Any]]] = {
        "tensor": lambda self, index: self._tensors[index],
        "tuple": lambda self, items: tuple(self.decode(item) for item in items),
        "dict": _dict,
        "int": lambda _, text: int(text, 16),
        "float": lambda _, text: struct.unpack("<d", bytes.fromhex(text))[0],
        "bytes": lambda _, text: base64.b64decode(text, validate=True),
        "array": lambda self, parts: self._tensors[parts[0]].numpy().view(_array_dtype(parts[1])).reshape(parts[2]),
        "scalar": lambda _, parts: np.frombuffer(base64.b64decode(parts[1]), _array_dtype(parts[0]))[0],
        "size": lambda _, shape: torch.Size(shape),
        "dtype": lambda _, name: dtype_named(name),
        "device": lambda _, name: torch.device(name),
    }


def _parse(skeleton: bytes) -> tuple[list[TensorSpec], Any]:
    """Read the tensors and the tree's node of a skeleton."""
    try:
        document = orjson.loads(skeleton)
        if document["format"] != FORMAT:
            raise StateError(
                f"the stored state has format {document['format']}, but this version of Resile reads format {FORMAT}; "
                "read it with the version that wrote it"
            )
        return [_spec(entry) for entry in document["tensors"]], document["tree"]
    except _MALFORMED as error:
        raise StateError(f"the stored state is not readable: {type(error).__name__}: {error}") from error


def _spec(entry: Mapping[str, Any]) -> TensorSpec:
    dtype = dtype_named(entry["dtype"])
    shape, dims = tuple(entry["shape"]), tuple(entry.get("dims", ()))
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {list(shape)}")
    if dims and sorted(dims) != list(range(len(shape))):
        raise ValueError(f"dims {list(dims)}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != entry["num_bytes"]:
        raise ValueError(f"{entry['path']} has {entry['num_bytes']} bytes instead of {num_bytes}")
    strides = tuple(entry.get("strides", ()))
    if strides and not _differs_in_single_elements(strides, shape, dims):
        raise ValueError(f"strides {list(strides)}")
    return TensorSpec(str(entry["path"]), dtype, shape, num_bytes, dims, strides)


def _differs_in_single_elements(strides: Sequence[Any], shape: Sequence[int], dims: tuple[int, ...]) -> bool:
    """Whether ``strides`` reach no further than those that ``shape`` and ``dims`` imply."""
    sizes = _undo(torch.empty(shape, device="meta"), dims).shape
    return len(strides) == len(sizes) and all(
        type(stride) is int and 0 <= stride < 2**63 and (size <= 1 or stride == implied)
        for stride, size, implied in zip(strides, sizes, _implied_strides(shape, dims), strict=True)
    )


def _implied_strides(shape: Sequence[int], dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tree's tensor that lies in memory as a contiguous tensor of ``shape``."""
    return _undo(torch.empty(shape, device="meta"), dims).stride()


def _memory_of(target: Tensor, spec: TensorSpec) -> Tensor | None:
    """Return the memory of ``target`` in the layout of ``spec``, if it has it."""
    if target.is_meta or target.dtype != spec.dtype or target.dim() != len(spec.shape):
        return None
    memory = target.detach().permute(spec.dims) if spec.dims else target.detach()
    return memory if memory.is_contiguous() and tuple(memory.shape) == spec.shape else None


def _in_tree(tensor: Tensor, spec: TensorSpec) -> Tensor:
    view = _undo(tensor, spec.dims)
    return view.as_strided(view.shape, spec.strides) if spec.strides else view


def _undo(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.permute(tuple(dims.index(i) for i in range(len(dims)))) if dims else tensor


def _check_storable(tensor: Tensor, path: tuple[Any, ...]) -> None:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.is_meta:
        raise StateError(f"{_place(path)} is {describe(tensor)}; only plain dense tensors can be stored in a state")


def _array_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"numpy dtype {text}")
    return dtype


def _checked_text(text: str, path: tuple[Any, ...]) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"{_place(path)} is a string that is not valid Unicode ({error}); store it as bytes") from None
    return text


def _largest(node: Any) -> list[Any]:
    """Return the keys of nested dicts that lead to most of what ``node`` consists of."""
    path: list[Any] = []
    num_bytes = len(orjson.dumps(node))
    while isinstance(node, dict) and node.get("dict"):
        sizes = [len(orjson.dumps(item)) for _, item in node["dict"]]
        if max(sizes) < num_bytes / 2:
            break
        num_bytes = max(sizes)
        key, node = node["dict"][sizes.index(num_bytes)]
        path.append(key)
    return path


def _place(path: Sequence[Any]) -> str:
    """Write a path as in Python: ``optimizer.state[0]['a b']``."""
    text = ""
    for key in path:
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}"
        else:
            text += f"[{key!r}]"
    return text.lstrip(".") or "the state"
