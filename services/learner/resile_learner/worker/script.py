"""Running the user's script, in an elastic job as in a gang: as ``python train.py`` does, in a forked process."""

import atexit
import os
import sys
import threading
from types import ModuleType

from ..code_copy import read_code
from ..messages import WorkerConfig


def run_script(config: WorkerConfig) -> None:
    """Run the script of ``config`` as ``__main__``, which it stays for the rest of the process.

    Its threads may still import it, or pickle what it defines. And its globals live on: a process group of gloo that is
    freed before the end may wait for its own thread, which waits for the interpreter. Raises what the script raises.
    """
    sys.argv = [config.script, *config.args]
    sys.path.insert(0, os.path.dirname(config.script))
    main = ModuleType("__main__")
    main.__file__ = config.script
    sys.modules["__main__"] = main
    code = compile(read_code(config.script, config.code), config.script, "exec")
    exec(code, main.__dict__)


def finish_script() -> None:
    """Wait for the script's threads, then run its atexit functions, which a forked process does not do when it ends."""
    threading._shutdown()  # type: ignore[attr-defined] # as an interpreter does: all threads that are not daemons
    atexit._run_exitfuncs()
