"""The training whose costs costs.py counts: an MLP in a loop by hand; each worker notes its counts once an iteration.

Counts are of things that are done, whatever the load of the machine: shards that are computed, frames that are sent,
memory that is made. With ``--mutants`` something more is done, as a change of the code might do by mistake.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from models import RandomVectors, mlp
from torch import Tensor
from torch.nn import functional as F

import resile.training
from resile.training import ElasticLoop
from resile_learner.collectives.link import Link
from resile_learner.collectives.poller import LinkPoller
from resile_learner.collectives.round import LinkRounds
from resile_learner.collectives.segments import Segment
from resile_learner.collectives.spec import Tag
from resile_learner.collectives.state_transfer import StateTransfer
from resile_learner.collectives.transport import TcpTransport
from resile_learner.membership.events import Switch
from resile_learner.messages import ChangeTraced, Heartbeat, Progress, Warned
from resile_learner.session import current_session
from resile_learner.state.run import RunState
from resile_learner.worker.control import WorkerControl
from resile_learner.worker.peers import PeerConnections
from resile_learner.worker.worker_session import WorkerSession

MUTANTS = ("message", "disk", "copy")
PROFILED = range(34, 42)
"""Iterations in which no shard is computed to be compared."""
UNCOUNTED = (Heartbeat, Progress, Warned)
"""Messages whose number depends on how long things take."""


Method = Callable[..., Any]


class Costs:
    """What this worker has done so far, by the names of what is counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: dict[int, object] = {}
        """By id, messages on their way to the control thread, which are counted already."""

    def count_python(self, *, is_on: bool) -> None:
        """Count calls of Python functions from now on, or no more. It takes a multiple of the time."""
        sys.setprofile(self._python_call if is_on else None)

    def _python_call(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.counts["python calls"] += 1

    def add(self, what: str, amount: int = 1) -> None:
        self.counts[what] += amount

    def _before(self, owner: Any, name: str, count: Callable[..., None]) -> None:
        """Have ``count`` called with the arguments of each call of a method."""
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            count(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    def count_in_worker(self) -> None:
        """Count what a worker does beside its computation."""
        self._before(Link, "send", self._frame)
        self._before(Link, "send_urgent", self._frame)
        self._before(LinkRounds, "begin", lambda *_: self.add("rounds"))
        self._before(Segment, "__init__", self._memory)
        self._before(StateTransfer, "send", self._state)
        self._before(WorkerControl, "report", self._report)
        self._before(WorkerControl, "_send_to_agent", self._message)
        self._before(PeerConnections, "send", self._to_peer)
        self._before(os, "fsync", lambda *_: self.add("waits for the disk"))
        self._before(Tensor, "clone", self._copy)
        self._before(LinkPoller, "wait", lambda *_, **__: self.add("sleeps"))
        self._before(TcpTransport, "send", lambda *_: self.add("system calls"))
        self._before(TcpTransport, "receive", lambda *_: self.add("system calls"))

    def _frame(self, link: Link, *buffers: bytes | memoryview) -> None:
        self.add("frames")
        self.add("frame bytes", sum(map(len, buffers)))

    def _memory(self, segment: Segment, fd: int, num_bytes: int, **more: Any) -> None:
        self.add("segments mapped" if more.get("lease") is not None else "segments made")

    def _state(self, transfer: object, peer: int, generation: int, skeleton: bytes, tensors: Any, **_: Any) -> None:
        self.add("state sent")

    def _report(self, control: object, message: object) -> None:
        """Counts in the iteration that reports it: the control thread may send it in the next one."""
        self._reported[id(message)] = message
        if not isinstance(message, UNCOUNTED):
            self.add("messages to agents")

    def _message(self, control: object, message: object) -> None:
        if self._reported.pop(id(message), None) is None and not isinstance(message, UNCOUNTED):
            self.add("messages to agents")

    def _to_peer(self, connections: object, peer: int, message: object) -> None:
        if not isinstance(message, UNCOUNTED):
            self.add("messages to peers")

    def _copy(self, tensor: Tensor, *_: object, **__: object) -> None:
        self.add("copied bytes", tensor.nbytes)


def mutated(mutants: Collection[str]) -> Callable[[], None]:
    """Do too much: at each change, or whenever the function that is returned is called."""
    if "disk" in mutants:
        _at_each_switch(lambda state: os.fsync(os.open(".", os.O_RDONLY)))
    if "copy" in mutants:
        _at_each_switch(lambda state: [tensor.clone() for tensor in state.flatten().tensors])
    return _send_a_message if "message" in mutants else lambda: None


def _send_a_message() -> None:
    view = current_session().view
    current_session().report(ChangeTraced(worker=view.me, generation=view.generation, change="none", spans=()))


def _at_each_switch(do: Callable[[RunState], object]) -> None:
    original = WorkerSession.switch

    def switch(session: WorkerSession, change: Switch, tag: Tag, state: RunState) -> None:
        do(state)
        original(session, change, tag, state)

    WorkerSession.switch = switch  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--notes", type=Path, help="a folder, for a file of each worker; without it, calls are counted")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--checkpoint-at", type=int)
    parser.add_argument("--mutants", nargs="*", choices=MUTANTS, default=())
    args = parser.parse_args()
    costs = Costs()
    if args.notes:
        costs.count_in_worker()
    do_too_much = mutated(args.mutants)
    resile.training.seed()
    model = mlp(288, layers=4)
    model.register_forward_hook(lambda *_: costs.add("shards computed"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loop = ElasticLoop(
        model,
        optimizer,
        RandomVectors(96, 64),
        epochs=args.iterations,
        batch_size=96,
        num_shards=12,
        checkpoint_every=args.checkpoint_at,
    )
    for iteration in loop:
        if not args.notes:
            costs.count_python(is_on=iteration.number in PROFILED)
        for inputs, targets in iteration.shards():
            iteration.backward(F.cross_entropy(model(inputs), targets))
        if iteration.exchange():
            optimizer.step()
        do_too_much()
        if args.notes:
            costs.counts["processor ms"] = int(time.process_time() * 1e3)
            note(args.notes / str(os.getpid()), {"iteration": iteration.number, "counts": costs.counts})
    print(costs.counts["python calls"] // len(PROFILED))


def note(file: Path, line: object) -> None:
    """Append a line at once, so that a reader finds no half of it."""
    with file.open("a") as notes:
        notes.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
