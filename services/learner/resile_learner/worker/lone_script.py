"""Finds a script that trains before its training call: each worker then trains alone, and all do the same work."""

from collections.abc import Callable

from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 100
"""More optimizer steps than a script makes to prepare its data or its model."""


class LoneTraining:
    """Counts the optimizer steps of this process, and calls ``report`` once if many come before the training call."""

    def __init__(self, *, is_called: Callable[[], bool], report: Callable[[str], None]) -> None:
        self._is_called = is_called
        self._report = report
        self._steps = 0
        self.hook = register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, *arguments: object) -> None:
        self._steps += 1
        if self._steps == STEPS and not self._is_called():
            self._report(
                f"the script has made {STEPS} optimizer steps without a training call: each worker is running this "
                "script alone. Call resile.training.prepare(model, optimizer, loader), ElasticModel(...).train() or "
                "ElasticLoop (docs/migrating.md)"
            )
