"""Variables of a script that belong to the state of the run."""

from types import SimpleNamespace
from typing import Any


class State(SimpleNamespace):
    """Variables of a script, as attributes, that a worker that joins and a run that resumes continue with.

    ::

        progress = resile.training.State(best=0.0)
        model, optimizer, loader = resile.training.prepare(model, optimizer, loader, state={"progress": progress})
        for epoch in loader.epochs(10):
            ...
            if score > progress.best:
                progress.best = score

    Values are numbers, strings, tensors, None, and lists, tuples and dicts of these. They change between epochs, or
    once an iteration (``if loader.sync_gradients:``), alike on all workers.
    """

    def state_dict(self) -> dict[str, Any]:
        """The attributes, by name."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Replace all attributes by those of ``state_dict``."""
        vars(self).clear()
        vars(self).update(state_dict)
