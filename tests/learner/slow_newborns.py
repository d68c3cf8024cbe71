"""The workers of acting_workers, but one that is forked from a template takes a second to report itself."""

import signal
import time

from resile_learner.processes import template

from acting_workers import main as main

_SECONDS = 1.0
_signal_on_parent_death = template.signal_on_parent_death


def _signal_late(number: signal.Signals) -> None:
    time.sleep(_SECONDS)
    _signal_on_parent_death(number)


template.signal_on_parent_death = _signal_late
