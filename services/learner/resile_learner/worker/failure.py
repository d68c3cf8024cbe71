"""The report of a worker's own failure: one line for the user, and where in the script it happened."""

import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable

import torch

from resile_shared.errors import ResileError, UsageError
from resile_shared.recent_events import InternalError

from ..hints import hint_about_files, hint_about_gradients, hint_about_shared_memory
from ..messages import Failed, WorkerConfig
from ..session import PreparedLoop, StateLost
from ..state.facts import MembersDiffer
from ..training.division.passes import NOTE
from ..training.watch.losses import NotANumber
from .failure_detection import Stall

_CAUGHT = re.compile(r"Caught \w+ in (.+?)\.\nOriginal Traceback \(most recent call last\):\n(.*)", re.DOTALL)
"""How PyTorch raises an error of another process or thread again."""
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in ', re.MULTILINE)
_LAST_INDENTED = re.compile(r"\A.*^ +File [^\n]*\n(?: [^\n]*\n)*", re.DOTALL | re.MULTILINE)
"""A traceback up to its last frame, with the lines of code below it: the error follows."""
_CPU_OUT_OF_MEMORY = "can't allocate memory"  # torch has no error of its own for it


def failed(config: WorkerConfig, message: str, details: str = "") -> Failed:
    """Return the worker's last report."""
    one_line = " ".join(message.split())
    return Failed(worker=config.worker, message=one_line, details=details)


def raised(
    config: WorkerConfig, error: BaseException, *, loop: PreparedLoop | None = None, num_workers: int = 1
) -> Failed:
    """Return the report of a script that ended with ``error``, and trains by ``loop`` on ``num_workers`` workers."""
    if isinstance(error, InternalError):
        message, _, events = str(error).partition("\n")
        return failed(config, message, details=f"{events}\n{_user_traceback(error)}")
    if isinstance(error, StateLost):
        return failed(config, str(error)).model_copy(update={"is_state_lost": True})
    place = _place_in_script(traceback.extract_tb(error.__traceback__), config)
    if isinstance(error, UsageError):
        return failed(config, f"{error}{place}").model_copy(update={"is_refusal": True})
    if isinstance(error, ResileError):
        return failed(config, f"{error}{place}" if isinstance(error, MembersDiffer | NotANumber) else str(error))
    text = _of_subprocess(error, config) or f"{type(error).__name__}: {error}{place}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_OUT_OF_MEMORY in str(error):
        notes = [note for note in getattr(error, "__notes__", []) if note.startswith(NOTE)]
        hint = notes[0].removeprefix(NOTE) if notes else "memory ran out: fewer workers or a smaller batch need less"
    else:
        hint = (
            hint_about_shared_memory(error)
            or (hint_about_gradients(error, loop) if loop is not None else "")
            or (hint_about_files(error) if place and num_workers > 1 else "")
        )
    return failed(config, f"{text}; {hint}" if hint else text, details=_user_traceback(error))


def stalled(config: WorkerConfig, stall: Stall) -> Failed:
    """Return the report of a main thread that makes no progress, with its present stack."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    place = _place_in_script(stack, config)
    of_script = next((number for number, frame in enumerate(stack) if frame.filename == config.script), 0)
    lines = traceback.format_list(stack[of_script:])
    return failed(config, f"{stall}{place}", details="".join(["Where it is (most recent call last):\n", *lines]))


def _of_subprocess(error: BaseException, config: WorkerConfig) -> str:
    """The reason and place of an error of a DataLoader's process, from the traceback in its text; else empty."""
    if not (found := _CAUGHT.match(str(error))):
        return ""
    frames = [traceback.FrameSummary(file, int(line), "", lookup_line=False) for file, line in _FRAME.findall(found[2])]
    reason = _LAST_INDENTED.sub("", found[2])
    return f"{reason.strip()}{_place_in_script(frames, config)}, in {found[1]}"


def _place_in_script(stack: Iterable[traceback.FrameSummary], config: WorkerConfig) -> str:
    """Where it happened: the innermost line of the script, or of a module of its project."""
    folder = os.path.dirname(config.script)
    project = os.path.join(config.code.folder if config.code else folder, "")
    frames = [frame for frame in stack if frame.filename.startswith(project) and "site-packages" not in frame.filename]
    if not frames:
        return ""
    return f" ({os.path.relpath(frames[-1].filename, folder)}, line {frames[-1].lineno})"


def _user_traceback(error: BaseException) -> str:
    """The traceback without the frames that start the script."""
    ours = [os.path.join(os.path.dirname(__file__), name) for name in ("bootstrap.py", "gang.py", "script.py")]
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
