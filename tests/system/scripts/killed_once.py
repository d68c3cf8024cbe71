"""Runs another script; the first worker that comes to a certain exchange of gradients kills itself.

    killed_once.py FILE NUMBER SCRIPT [ARGUMENT...]

The worker creates FILE before exchange NUMBER, counted in its process.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from resile_learner.training.iteration import Iteration

killed, number, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
exchange = Iteration.exchange
count = 0


def exchange_or_die(iteration: Iteration) -> bool:
    global count
    count += 1
    if count == number:
        try:
            killed.touch(exist_ok=False)
        except FileExistsError:
            return exchange(iteration)
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange(iteration)


Iteration.exchange = exchange_or_die  # type: ignore[method-assign]
sys.argv[:] = sys.argv[3:]
runpy.run_path(script, run_name="__main__")
