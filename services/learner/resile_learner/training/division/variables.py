"""The variables of a script's loop: a worker that joins, and a run that resumes, continue with those of the others.

What every worker has anyway does not travel: variables that have not changed since the loop began, the models and
optimizers of the run, and what the body assigns before it reads it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from .frames import assigned_first, frames_of, loop_frame, scope_of, write_back
from .values import MAX_BYTES, LargeValue, OpaqueValue, Values, restore, restore_attributes

_MODELS = "models"
"""The scope of the attributes of models."""


class LoopVariables:
    """The variables around the loop, as a part of a run's state.

    ``known`` are the objects whose values are parts of that state already. The attributes of the loader's
    ``dataset`` are like variables: the body may change its labels. So are those of the models that
    ``in_full()`` returns by name: what they keep from call to call is alike on all workers.
    """

    may_differ = True
    """Whether members may have different values: such as times."""

    def __init__(
        self,
        known: Iterable[object],
        dataset: object,
        warn: Callable[[str], None],
        in_full: Callable[[], Mapping[str, nn.Module]] = dict,
    ) -> None:
        self._values = Values([*known, self])
        self._dataset = dataset
        self._in_full = in_full
        self.warn = warn
        self._frames: list[FrameType] = []
        self._outermost: int | None = None
        self._marks: dict[str, dict[str, Any]] = {}
        """The marks of the values with which the loop began, by scope and name."""
        self._received: dict[str, dict[str, Any]] | None = None
        self._named: set[str] = set()

    @contextmanager
    def seen_from(self, caller: FrameType, *, is_outermost: bool = False) -> Iterator[None]:
        """While the loader is asked by ``caller`` for a batch, or (``is_outermost``) for an epoch."""
        if is_outermost:
            self._outermost = id(loop_frame(caller))
        self._frames = frames_of(caller, self._outermost)
        try:
            yield
        finally:
            self._frames = []

    def begin(self) -> None:
        """The script goes on with what it asked for: note how its variables are, if that is not known yet."""
        for scope, values in self._scopes().items():
            if scope not in self._marks:
                self._marks[scope] = {name: self._values.mark(value) for name, value in values.items()}

    def restore(self) -> None:
        """Set the variables that were received, once."""
        received, self._received = self._received, None
        if received is None:
            return
        scopes = self._scopes()
        for scope, values in received.items():
            if scope in scopes:
                for name, value in values.items():
                    scopes[scope][name] = restore(scopes[scope].get(name), value)
                    self._marks[scope][name] = None  # it is given on, whatever it is
        for frame in self._frames:
            write_back(frame)
        models = self._in_full()
        for name, attributes in received.get(_MODELS, {}).items():
            if name in models:
                restore_attributes(models[name], attributes)

    def state_dict(self) -> dict[str, Any]:
        """Return the variables that have changed, by scope and name."""
        if self._received is not None:
            return self._received
        changed: dict[str, dict[str, Any]] = {}
        skipped = assigned_first(self._frames[0]) if self._frames else set()
        for number, (scope, values) in enumerate(self._scopes().items()):
            marks = self._marks.get(scope, {})
            changed[scope] = {}
            for name, value in values.items():
                is_skipped = number == 0 and name in skipped
                if not is_skipped and (name not in marks or self._values.mark(value) != marks[name]):
                    self._add(changed[scope], name, value)
        changed[_MODELS] = {}
        for name, model in self._in_full().items():
            self._add(changed[_MODELS], name, model, encode=self._values.encode_attributes)
        return changed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what `state_dict` returned on another worker, or in an earlier run, for `restore`."""
        self._received = state_dict

    def _add(
        self, changed: dict[str, Any], name: str, value: Any, *, encode: Callable[[Any], Any] | None = None
    ) -> None:
        try:
            changed[name] = (encode or self._values.encode)(value)
        except OpaqueValue:
            return
        except LargeValue:
            if name not in self._named:
                self._named.add(name)
                self.warn(
                    f"{name} is changed by the loop and has over {MAX_BYTES >> 20} MiB: a worker that joins and a run "
                    f'that resumes begin with it as the script has made it. Pass it as prepare(..., state={{"{name}": '
                    f"{name}}}) if it has state_dict() and load_state_dict(), or keep it in a resile.training.State"
                )

    def _scopes(self) -> dict[str, MutableMapping[str, Any]]:
        """The variables of the frames by name, the innermost first, and those of their modules."""
        scopes: dict[str, MutableMapping[str, Any]] = {}
        for frame in self._frames:
            scopes.setdefault(scope_of(frame), frame.f_locals)
        for frame in self._frames:
            scopes.setdefault(f"module {frame.f_globals.get('__name__')}", frame.f_globals)
        if self._frames:
            scopes["loader.dataset"] = getattr(self._dataset, "__dict__", {})
        return scopes
