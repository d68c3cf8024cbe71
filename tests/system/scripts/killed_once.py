"""Runs another script; the first worker that comes to a certain exchange of gradients kills itself.

    killed_once.py FILE NUMBER SCRIPT [ARGUMENT...]

The worker creates FILE before exchange NUMBER, counted in its process.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resile_learner.training.division.call import Call
from resile_learner.training.iteration import Iteration

killed, number, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
count = 0


def count_or_die() -> None:
    global count
    count += 1
    if count == number:
        try:
            killed.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def dying(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def exchange_or_die(*args: Any, **kwargs: Any) -> Any:
        count_or_die()
        return exchange(*args, **kwargs)

    return exchange_or_die


Iteration.exchange = dying(Iteration.exchange)  # type: ignore[method-assign]
Call.backward = dying(Call.backward)  # type: ignore[method-assign]
sys.argv[:] = sys.argv[3:]
runpy.run_path(script, run_name="__main__")
