"""The workers of acting_workers, but one that is forked from a template takes a second to report itself."""

import importlib
import signal
import time

main = importlib.import_module("acting_workers").main
_template = importlib.import_module("resile_learner.processes.template")
_signal_on_parent_death = _template.signal_on_parent_death


def _signal_late(number: signal.Signals) -> None:
    time.sleep(1.0)
    _signal_on_parent_death(number)


_template.signal_on_parent_death = _signal_late  # type: ignore[attr-defined]
