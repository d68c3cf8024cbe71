"""The main function of a worker process, from the fork to its exit."""

import os
import socket
from functools import partial
from importlib import import_module

from ..code_copy import install_code_copy
from ..collectives.poller import LinkPoller
from ..lone_training import LoneTraining
from ..messages import COMPAT, Failed, Finished, Warned, WorkerConfig
from ..session import complete_left, enter_session
from ..training.prewarm import keep_freed_memory
from ..training.seeds import seed
from .control import Withdrawn
from .control_thread import ControlThread
from .failure import failed, raised
from .gang import run_in_gang
from .imported import ImportWatch
from .replica import run_as_replica
from .script import finish_script, run_script
from .signals import leave_signals_to_launcher
from .worker_session import WorkerSession


def main(config: WorkerConfig, agent: socket.socket) -> int:
    """Run the user's script as worker ``config.worker``; return the exit status.

    The outcome is reported to the agent over ``agent``; a leaver's process ends inside its training call.
    """
    keep_freed_memory()
    if config.code and config.template is None:  # a template has installed it
        install_code_copy(config.code)
    if config.gang is not None:
        run_in_gang(config, config.gang, agent)
    leave_signals_to_launcher()
    if config.replica is not None:
        run_as_replica(config, config.replica, agent)
    watch = ImportWatch(os.path.dirname(config.script))
    poller = LinkPoller()
    thread = ControlThread(config, agent, poller)
    thread.start()
    session = WorkerSession(
        config, thread.control, poller, imported=watch.imported, leave=partial(thread.leave_process, status=0)
    )
    enter_session(session)
    LoneTraining(
        is_called=lambda: session.training_called,
        report=lambda text: thread.control.report(Warned(worker=config.worker, message=text)),
    )
    if config.template is None:  # a template has seeded, and then imported what may draw random numbers
        seed()
    outcome = _run_script(config, session)
    if isinstance(outcome, Finished):
        finish_script()
    if outcome is not None:
        thread.control.report(outcome)
    thread.leave_process(status=int(isinstance(outcome, Failed)))


def _run_script(config: WorkerConfig, session: WorkerSession) -> Finished | Failed | None:
    """Run the script; return how it ended, None when this worker turned out not to be needed."""
    try:
        if compat := os.environ.get(COMPAT):
            import_module(compat).activate(config.env)
        run_script(config)
    except Withdrawn:
        return None
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            return failed(config, f"the script ended itself: sys.exit({leaving.code!r})")
    except BaseException as error:
        return raised(config, error, loop=session.prepared, num_workers=session.num_workers)
    try:
        return _outcome(config, session)
    except Withdrawn:
        return None
    except BaseException as error:
        return raised(config, error, loop=session.prepared, num_workers=session.num_workers)


def _outcome(config: WorkerConfig, session: WorkerSession) -> Finished | Failed:
    if not session.training_called:
        return failed(
            config,
            "the script ended without a training call: build an ElasticModel and call its train(), iterate over "
            "an ElasticLoop, or prepare an ordinary loop and iterate over loader.epochs()",
        )
    if session.failure:
        return raised(config, session.failure)  # the script has caught it
    if not session.completed:
        complete_left(session)
    return Finished(worker=config.worker)
