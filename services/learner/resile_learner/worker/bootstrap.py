"""The life of a worker process: from the fork to its exit."""

import atexit
import os
import runpy
import socket
import sys
import traceback

from resile_shared.errors import ResileError

from ..collectives.mesh import Mesh
from ..messages import Failed, Finished, WorkerConfig
from ..training.seeds import seed
from ..training.session import enter_session
from .allocator import keep_freed_memory
from .control import Control, Withdrawn
from .session import WorkerSession, leave_process


def main(config: WorkerConfig, agent: socket.socket) -> int:
    """Run the user's script as worker ``config.worker``; return the exit status.

    Outcomes are told to the agent over ``agent``; a leaver's process ends inside its training call.
    """
    keep_freed_memory()
    mesh = Mesh(config.worker)
    control = Control(config, agent, mesh)
    control.start()
    session = WorkerSession(config, control, mesh)
    enter_session(session)
    seed()
    last_word = _run_script(config, session)
    if isinstance(last_word, Finished):
        atexit._run_exitfuncs()  # the script's own, which the end of a forked process would skip
    if last_word is not None:
        control.report(last_word)
    leave_process(control, status=int(isinstance(last_word, Failed)))


def _run_script(config: WorkerConfig, session: WorkerSession) -> Finished | Failed | None:
    """Run the script as ``__main__``; tell how it ended. None when this worker turned out not to be needed."""
    sys.argv = [config.script, *config.args]
    sys.path.insert(0, os.path.dirname(config.script))
    try:
        runpy.run_path(config.script, run_name="__main__")
    except Withdrawn:
        return None
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            return _failed(config, f"the script ended itself: sys.exit({leaving.code!r})")
    except ResileError as error:
        return _failed(config, str(error))
    except BaseException as error:
        place = _place_in_script(error, config.script)
        return _failed(config, f"{type(error).__name__}: {error}{place}", details=_user_traceback(error))
    return _verdict(config, session)


def _verdict(config: WorkerConfig, session: WorkerSession) -> Finished | Failed:
    if not session.training_called:
        return _failed(
            config,
            "the script ended without a training call: build an ElasticModel and call its train(), or iterate over "
            "an ElasticLoop",
        )
    if not session.completed:
        return _failed(config, "the training loop was left before its end: call loop.stop() instead of `break`")
    return Finished(worker=config.worker)


def _failed(config: WorkerConfig, message: str, details: str = "") -> Failed:
    one_line = " ".join(message.split())
    return Failed(worker=config.worker, message=one_line, details=details)


def _place_in_script(error: BaseException, script: str) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    return f" ({os.path.basename(script)}, line {frames[-1].lineno})" if frames else ""


def _user_traceback(error: BaseException) -> str:
    """The traceback without the frames that start the script."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
