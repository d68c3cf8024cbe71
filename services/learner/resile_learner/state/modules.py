"""The modules of a model, without walking through it in each iteration."""

from collections.abc import Sequence
from operator import is_not

from torch import nn


class ModuleTree:
    """The modules of ``model``. It is walked again only after a module was added, removed or replaced.

    ``nn.Module.named_modules`` passes each module through a generator for each level above it, which costs a small
    model a percent of its iteration each time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._walk()

    def named(self) -> Sequence[tuple[str, nn.Module]]:
        """Return each module once, with its path, in the order of ``named_modules``."""
        children = self._present_children()
        if len(children) != len(self._children) or any(map(is_not, children, self._children)):
            self._walk()
        return self._named

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all modules; one that several modules share is returned for each of them."""
        present = [parameter for _, module in self.named() for parameter in module._parameters.values()]
        return [parameter for parameter in present if parameter is not None]

    def _walk(self) -> None:
        self._named = list(self._model.named_modules())
        self._children = self._present_children()

    def _present_children(self) -> list[nn.Module | None]:
        return [child for _, module in self._named for child in module._modules.values()]
