"""Tensors whose values are obtained where the script first uses them: until then it knows shape, type and device."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils._pytree import tree_map_only

from resile_shared.errors import UsageError

_KNOWN = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.get_device,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "is_cuda", "requires_grad")
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

    def values(self, tensor: "Deferred") -> Tensor:
        """All values of ``tensor``."""

    def rows(self, rows: slice) -> Tensor:
        """The values of some rows."""


class Deferred(Tensor):
    """A tensor whose values are those of ``source``.

    Whatever is computed with it, stored, printed or changed in place, is done with these values.
    """

    source: Source
    obtained: Tensor | None
    """All values, once something has used them."""
    _version_obtained: int
    _conversions: list[weakref.ref["Deferred"]]
    """Tensors of other types that were made of it: of its values before they are changed in place."""

    def __new__(cls, source: Source, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "Deferred":
        """Return a tensor that knows no values yet."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.source, made.obtained, made._version_obtained, made._conversions = source, None, 0, []
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
        if func in _CONVERTED and has_rows(args[0]) and args[0].obtained is None:
            return args[0]._converted(func, args[1:], kwargs)
        given, more = tree_map_only(Deferred, values_of, (args, kwargs))
        result = func(*given, **more)
        if func in _REQUIRING:
            _require_gradient(args[0])
        changed = kwargs.get("out", args[0] if args else None)
        return changed if isinstance(changed, Deferred) and result is changed.obtained else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The same for calls that PyTorch does not tell of above, such as those of extensions."""
        args, kwargs = tree_map_only(Deferred, values_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def is_changed(self) -> bool:
        """Whether its values were changed in place, or want a gradient."""
        values = self.obtained
        return values is not None and (values._version != self._version_obtained or values.requires_grad)

    def obtain(self) -> Tensor:
        """Return all values."""
        if self.obtained is None:
            with _uncompiled():
                self.obtained = self.source.values(self)
            self._version_obtained = self.obtained._version
            for each in self._conversions:
                if (conversion := each()) is not None:
                    conversion.obtain()
        return self.obtained

    def _converted(self, func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(Deferred, values_of, (args, kwargs))
        like = func(torch.empty((0, *self.shape[1:]), dtype=self.dtype, device=self.device), *args, **kwargs)
        if not isinstance(like, Tensor):  # tensor.type() returns a name
            return func(values_of(self), *args, **kwargs)
        may_copy = bool(kwargs.keys() & {"copy", "memory_format"}) or any(each is True for each in args)
        if (like.dtype, like.device) == (self.dtype, self.device) and not may_copy:
            return self
        source = _Converted(self, lambda values: func(values, *args, **kwargs))
        made = Deferred(source, self.shape, like.dtype, like.device)
        self._conversions.append(weakref.ref(made))
        return made


class _Converted:
    has_rows = True

    def __init__(self, before: Deferred, convert: Callable[[Tensor], Tensor]) -> None:
        self._before = before
        self._convert = convert

    def values(self, tensor: Deferred) -> Tensor:
        return self._convert(values_of(self._before))

    def rows(self, rows: slice) -> Tensor:
        return self._convert(rows_of(self._before, rows))


class Stored:
    """Values that are there: those of a tensor that was deferred on another worker."""

    has_rows = True

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def values(self, tensor: Deferred) -> Tensor:
        """See `Source`."""
        return self._values

    def rows(self, rows: slice) -> Tensor:
        """See `Source`."""
        return self._values[rows]


def values_of(tensor: Tensor) -> Tensor:
    """Return all values of a tensor, which are obtained if they are deferred."""
    return tensor.obtain() if isinstance(tensor, Deferred) else tensor


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Return some rows of a tensor, of which no others are obtained."""
    if isinstance(tensor, Deferred) and tensor.obtained is None:
        return tensor.source.rows(rows)
    return values_of(tensor)[rows]


def is_deferred(tensor: object) -> TypeGuard[Deferred]:
    """Whether nothing has used the values of ``tensor`` yet."""
    return isinstance(tensor, Deferred) and tensor.obtained is None


def has_rows(tensor: object) -> bool:
    """Whether ``tensor`` is of a batch as it was read, or will be: workers may have obtained different parts of it."""
    return isinstance(tensor, Deferred) and tensor.source.has_rows and not tensor.is_changed


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Nothing is compiled in this context, as with torch.compiler.disable, which takes a second to import."""
    before = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(before)


def _require_gradient(tensor: Deferred) -> None:
    """Refuse a gradient that does not reach the values, where PyTorch has taken ``tensor`` itself as their leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.requires_grad and tensor.is_floating_point():
            tensor.requires_grad_()
            tensor.register_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(gradient: Tensor) -> None:
    raise UsageError(
        "a gradient of a tensor of the loader's batch goes through a function of your own, or a compiled one: give it "
        "a copy, as in `x = x.clone().requires_grad_()`"
    )


Deferred.obtain._torchdynamo_disable = True  # type: ignore[attr-defined]
_REQUIRING = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
