"""What the modules of a model keep in their attributes."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from .division.values import Values

Saved = Mapping[nn.Module, Mapping[str, Any]]


def save_attributes(model: nn.Module) -> Saved:
    """Return the attributes of all modules."""
    return {module: dict(vars(module)) for module in model.modules()}


def restore_attributes(saved: Saved) -> None:
    """Restore what `save_attributes` returned."""
    for module, attributes in saved.items():
        vars(module).update(attributes)
        for name in vars(module).keys() - attributes.keys():
            del vars(module)[name]


def marked_attributes(model: nn.Module) -> dict[str, Any]:
    """The marks of the attributes of all modules that are not PyTorch's own, by the path."""
    values, own = Values([model]), vars(nn.Module())
    return {
        f"{path}.{name}" if path else name: values.mark(value)
        for path, module in model.named_modules()
        if type(module).__module__.partition(".")[0] != "torch"
        for name, value in vars(module).items()
        if name not in own
    }
