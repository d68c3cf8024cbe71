"""A template: a process forked from a fork server that has imported what the workers of a job import, and no more.

It imports what the job's script imports at its head, and what its first workers were seen to import before their
training call; of the user's own code nothing runs. Then it makes sure that a worker forked from it is like one that has
imported all that by itself: there is no thread, no open file or socket, no process, no context on an accelerator, and
the random generators are where a worker's would be. Anything else is a refusal, with the reason, and workers are forked
from the fork server as before.

A worker is forked twice, so that it is a child of the fork server and lives on when the template ends. It waits, in
the template's session, until the fork server has recorded it; a new worker that gets no answer ends by itself.
"""

import gc
import importlib
import os
import random
import resource
import signal
import socket
import stat
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..code_copy import install_code_copy
from ..messages import COMPAT
from .descendants import adopt_orphans, descendants, die_with_parent, signal_on_parent_death
from .fork_protocol import FORK_DESCRIPTORS, TemplateContent, TemplateExited, TemplateLoaded
from .forked import Entry, adopt, end_library_threads, exit_with, open_outputs, reset_signals
from .script_head import head_imports

MAX_BYTES = 1 << 30
"""Maximum bytes of memory that a template shares with no other process."""
SLICE_SECONDS, PAUSE_SECONDS = 0.01, 0.04
"""Beside training, a template computes for the first of these times, then rests for the second, in seconds."""
ADOPTION_SECONDS = 10.0
GO = b"go"
MAX_REASON = 500
RandomState = tuple[Any, ...]
"""State of Python's random generator."""
_HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")


class TemplateRefused(Exception):
    """No worker may be forked from this process, because of what an import did."""


def run_template(
    number: int,
    content: TemplateContent,
    control: socket.socket,
    entry: Entry,
    *,
    fork_server: int,
    close: Callable[[], None],
) -> NoReturn:
    """In a child of the fork server: import, report, and fork workers until ``control`` is closed.

    ``close`` closes what it must not have of the fork server.
    """

    def main() -> int:
        die_with_parent(fork_server)
        os.setsid()
        reset_signals()
        close()
        open_outputs()
        try:
            ready = _prepare(number, content)
        except BaseException as error:
            reason = str(error) if isinstance(error, TemplateRefused) else f"{type(error).__name__}: {error}"
            ended = TemplateExited(template=number, reason=" ".join(reason.split())[:MAX_REASON], is_refused=True)
            control.send(ended.model_dump_json().encode())
            return 1
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a child that has forked a worker is nobody's to wait for
        control.send(ready.model_dump_json().encode())
        drawn = random.getstate()  # python seeds it anew at a fork
        while True:
            packet, descriptors, _, _ = socket.recv_fds(control, 16, len(FORK_DESCRIPTORS) + 1)
            if not packet:
                return 0
            _fork_worker(descriptors, control, entry, fork_server, drawn)

    exit_with(main)


def _prepare(number: int, content: TemplateContent) -> TemplateLoaded:
    _seed()
    before = _Surroundings()
    first = frozenset(sys.modules)
    os.environ.update(content.env)
    os.chdir(content.directory)
    sys.argv = [content.script]
    if content.code:
        install_code_copy(content.code)
    limits = _limit_memory()
    if not content.is_urgent:
        _rest_often()
    if COMPAT not in os.environ:  # else the script runs only after something else
        for carry_out in head_imports(Path(content.script), content.code):
            _carry_out(carry_out)
    states = _random_states()
    _import_listed(content.modules)
    _compare_random_states(states)
    if not content.is_urgent:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    os.chdir("/")
    gc.collect()
    before.compare()
    gc.freeze()  # so that a worker's collector does not touch, and thereby copy, every page
    num_bytes = _own_bytes()
    if num_bytes > MAX_BYTES:
        raise TemplateRefused(f"it has {num_bytes >> 20} MiB of its own, and {MAX_BYTES >> 20} MiB are the most")
    return TemplateLoaded(template=number, num_modules=len(sys.modules.keys() - first), num_bytes=num_bytes)


def _carry_out(carry_out: Callable[[], object]) -> None:
    try:
        carry_out()
    except BaseException as error:
        raise TemplateRefused(f"an import fails here: {type(error).__name__}: {error}") from error


def _import_listed(modules: Sequence[str]) -> None:
    """Import modules by name. Raises TemplateRefused if that imports others: they would be another version's."""
    before = frozenset(sys.modules)
    for name in modules:
        _carry_out(lambda name=name: importlib.import_module(name))  # type: ignore[misc]
    if others := sys.modules.keys() - before - frozenset(modules):
        known = [name for name in sys.modules if name in others and _is_importable(name)]
        if known:
            raise TemplateRefused(f"{known[0]} is imported here, and was not by the job's first workers")


def _is_importable(name: str) -> bool:
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and spec.name == name and bool(spec.has_location)


def _limit_memory() -> tuple[int, int]:
    """Let an import that takes far too much fail; return the limits as they were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _status_bytes("VmData") + 4 * MAX_BYTES
    limits = [limit for limit in (soft, hard, wanted) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    return soft, hard


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _own_bytes() -> int:
    """Memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def _rest_often() -> None:
    """Leave the processor to training: a nice value would be that of the workers, since it cannot be lowered again."""

    def rest(signum: int, frame: FrameType | None) -> None:
        time.sleep(PAUSE_SECONDS)

    signal.signal(signal.SIGPROF, rest)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, SLICE_SECONDS, SLICE_SECONDS)


class _Surroundings:
    """What imports may not change."""

    def __init__(self) -> None:
        self._open = _open_files()
        self._folders = _temporary_folders()

    def compare(self) -> None:
        """Raise TemplateRefused if something has changed."""
        try:
            end_library_threads()
        except RuntimeError as error:
            raise TemplateRefused(str(error)) from error
        opened = [file for descriptor, file in _open_files().items() if self._open.get(descriptor) != file]
        if opened:
            raise TemplateRefused(f"an import opened {', '.join(sorted(opened))}")
        if _temporary_folders() - self._folders:
            raise TemplateRefused("an import made a temporary folder, which the first worker to end would remove")
        if children := descendants(os.getpid()):
            raise TemplateRefused(f"an import started {len(children)} processes")
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            raise TemplateRefused("an import made a context on an accelerator")


def _open_files() -> dict[int, str]:
    """What each open descriptor is, except for devices without state."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            mode = os.fstat(int(name)).st_mode
        except OSError:
            continue  # the one that lists the folder
        if not (stat.S_ISCHR(mode) and target in _HARMLESS):
            found[int(name)] = target
    return found


def _temporary_folders() -> set[int]:
    """The `TemporaryDirectory` objects that are removed when the process ends."""
    known = weakref.finalize._registry.items()  # type: ignore[attr-defined]
    return {id(each) for each, info in known if info.func.__module__ == "tempfile"}


def _seed() -> None:
    """Seed the generators as a worker does before its script runs: what the head draws is then drawn here."""
    seeds = sys.modules.get("resile_learner.training.seeds")
    if seeds is not None:
        seeds.seed()


def _compare_random_states(before: dict[str, object]) -> None:
    """Raise TemplateRefused if random numbers were drawn: a worker would draw them later, after others."""
    for generator, state in _random_states().items():
        if state != before.get(generator, state):
            raise TemplateRefused(f"an import draws from, or seeds, the global random generator of {generator}")


def _random_states() -> dict[str, object]:
    states: dict[str, object] = {"python": random.getstate()}
    if "numpy.random" in sys.modules:
        name, keys, *rest = sys.modules["numpy.random"].get_state()
        states["numpy"] = (name, keys.tobytes(), *rest)
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


def _fork_worker(
    descriptors: list[int], control: socket.socket, entry: Entry, fork_server: int, drawn: RandomState
) -> None:
    """Fork a child that forks the worker and ends at once: the worker then belongs to the fork server.

    The next worker is forked meanwhile: a fork of this much memory, and the end of a child, take 10 to 20 ms each.
    """
    try:
        if os.fork() == 0:
            try:
                if os.fork() == 0:
                    exit_with(lambda: _become_worker(descriptors, control, entry, fork_server, drawn))
            finally:
                os._exit(0)
    except OSError:
        pass  # the answer that the fork server waits for ends without a word
    for descriptor in descriptors:
        os.close(descriptor)


def _become_worker(
    descriptors: list[int], control: socket.socket, entry: Entry, fork_server: int, drawn: RandomState
) -> int:
    """In the worker: be a child of the fork server, wait for its answer, and run."""
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *own, ready = descriptors
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != fork_server:
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.0005)
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != fork_server:
        return 1
    os.write(ready, str(os.getpid()).encode())
    if os.read(ready, 16) != GO:
        return 1
    os.close(ready)
    adopt_orphans()
    os.setsid()
    random.setstate(drawn)
    return entry(*adopt(own))
