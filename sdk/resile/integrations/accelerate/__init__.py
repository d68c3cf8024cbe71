"""Hugging Face's Accelerate, elastic.

::

    from resile.integrations.accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in loader.epochs(10):
        ...
"""

from ..requirements import require

require("accelerate", minimum="1.15", below="2")

from .accelerator import Accelerator, PreparedLoader  # noqa: E402

__all__ = ["Accelerator", "PreparedLoader"]
