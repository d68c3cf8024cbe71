"""Leaving a training loop by ``break``: it ends the run, if all workers leave the loop after the same iteration.

A generator cannot tell ``break`` from an error that the script catches. So the run is completed when the script goes
on: when it next uses the loop, loads a state into the model, or ends without an error.
"""

from torch import nn
from torch.utils.hooks import RemovableHandle

from resile_shared.errors import UsageError

from ..session import current_session
from .digest import params_sha256


class Departure:
    """Whether a script has left its ``loop``, which trains ``model``.

    For error messages, ``owner`` has `stop` and the result, and ``held`` says how a loop is kept from ending, and what
    to write instead; None: a script that ends without an error has left its loop, also if something still refers to it.
    """

    def __init__(self, model: nn.Module, *, loop: str, owner: str, held: str | None) -> None:
        self.has_left = False
        """Whether the script has left the loop before the end of the run."""
        self._model = model
        self._loop = loop
        self._owner = owner
        self._held = held
        self._left_model = ""
        """The sha256 of the model when the script left the loop."""
        self._hooks: list[RemovableHandle] = []

    def leave(self) -> None:
        """The script leaves the loop."""
        self.has_left = True
        self._left_model = params_sha256(self._model)
        models = self._model if isinstance(self._model, nn.ModuleList) else [self._model]
        self._hooks = [model.register_load_state_dict_pre_hook(_complete_if_left) for model in models]  # type: ignore[no-untyped-call]

    def begin_completion(self) -> None:
        """Raises UsageError if the model may not be that of the newest iteration any more."""
        if not self.has_left and self._held is None:
            return
        if not self.has_left:
            raise UsageError(
                f"the script left its loop over {self._loop} while something still refers to it, as after {self._held}"
                f", or call {self._owner}.stop() instead of `break`"
            )
        if params_sha256(self._model) != self._left_model:
            raise UsageError(
                f"the model was changed after the loop over {self._loop} was left, before training was complete: read "
                f"{self._owner}.result first, which completes it"
            )
        self.has_left = False

    def close(self) -> None:
        """The run is complete."""
        for hook in self._hooks:
            hook.remove()


def _complete_if_left(*_: object) -> None:
    """Complete the run before a script that has left its loop loads other parameters, such as the best ones."""
    if (loop := current_session().prepared) is not None:
        loop.complete_if_left()
