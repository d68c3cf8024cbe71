"""Tensors whose values are obtained where the script first uses them: until then it knows shape, type and device."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_KNOWN = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.get_device,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "is_cuda")
    ),
}
"""What is known without the values."""
_CONVERTED = {
    Tensor.to,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.type,
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.long,
    Tensor.int,
    Tensor.bool,
}
"""What changes the type or the device of each value, and nothing else."""


class Source(Protocol):
    """Where the values of a tensor are obtained."""

    has_rows: bool
    """Whether some rows cost less than all values; if not, the values belong to the graph of autograd."""

    def values(self) -> Tensor:
        """All values."""

    def rows(self, rows: slice) -> Tensor:
        """The values of some rows."""


class Deferred(Tensor):
    """A tensor whose values are those of ``source``.

    Whatever is computed with it, stored, printed or changed in place, is done with these values.
    """

    source: Source
    obtained: Tensor | None
    """All values, once something has used them."""

    def __new__(cls, source: Source, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "Deferred":
        """Return a tensor that knows no values yet."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.source, made.obtained = source, None
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is asked for with the values, where it needs them."""
        kwargs = kwargs or {}
        if func in _KNOWN and args[0].obtained is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _CONVERTED and has_rows(args[0]):
            return args[0]._converted(func, args[1:], kwargs)
        args, kwargs = tree_map_only(Deferred, values_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The same for calls that PyTorch does not tell of above, such as those of extensions."""
        args, kwargs = tree_map_only(Deferred, values_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _converted(self, func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(Deferred, values_of, (args, kwargs))
        like = func(torch.empty(0, dtype=self.dtype, device=self.device), *args, **kwargs)
        if not isinstance(like, Tensor):  # tensor.type() returns a name
            return func(values_of(self), *args, **kwargs)
        if (like.dtype, like.device) == (self.dtype, self.device) and not kwargs.get("copy"):
            return self
        source = _Converted(self, lambda values: func(values, *args, **kwargs))
        return Deferred(source, self.shape, like.dtype, like.device)


class _Converted:
    has_rows = True

    def __init__(self, before: Deferred, convert: Callable[[Tensor], Tensor]) -> None:
        self._before = before
        self._convert = convert

    def values(self) -> Tensor:
        return self._convert(values_of(self._before))

    def rows(self, rows: slice) -> Tensor:
        return self._convert(rows_of(self._before, rows))


def values_of(tensor: Tensor) -> Tensor:
    """Return all values of a tensor, which are obtained if they are deferred."""
    if not isinstance(tensor, Deferred):
        return tensor
    if tensor.obtained is None:
        tensor.obtained = tensor.source.values()
    return tensor.obtained


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Return some rows of a tensor, of which no others are obtained."""
    if isinstance(tensor, Deferred) and tensor.obtained is None:
        return tensor.source.rows(rows)
    return values_of(tensor)[rows]


def is_deferred(tensor: object) -> bool:
    """Whether nothing has used the values of ``tensor`` yet."""
    return isinstance(tensor, Deferred) and tensor.obtained is None


def has_rows(tensor: object) -> bool:
    """Whether some rows of ``tensor`` cost less than all values."""
    return isinstance(tensor, Deferred) and tensor.obtained is None and tensor.source.has_rows
