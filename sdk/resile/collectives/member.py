"""A member over the session of a worker: rounds of headers and sums, the switch of generations, recovery.

Every call begins with a round of headers, in which the members compare what they call; an all-reduce is a round of sums
behind it. At a boundary the headers also name the generation that each member has formed, and who leaves: the others
wait there until a generation without the leavers is active.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from resile_learner.collectives.exchange import ExchangeRound
from resile_learner.collectives.poller import LinkPoller
from resile_learner.collectives.spec import Abandoned, RoundSpec, Tag
from resile_learner.collectives.tree import Interval
from resile_learner.messages import MAX_NUMBER, Joined, Progress, Ready, Switched, WorkerConfig
from resile_learner.session import View
from resile_learner.state.facts import MembersDiffer, minority
from resile_learner.state.memory import StateError
from resile_learner.state.run import RunState
from resile_learner.worker.control import Withdrawn
from resile_learner.worker.control_thread import ControlThread
from resile_learner.worker.worker_session import WorkerSession
from resile_shared.errors import UsageError

from .calls import Aborted, CallHeader, CallsDiffer, MemberLost, MemberTimeout, Removed, RendezvousLost, Watchdog
from .contributions import Contributions
from .enrollment import Enrolled, Enrollment, Reenrollment
from .messages import GroupEnded, LeaveRequested

PROGRESS_SECONDS = 0.1
IDLE_SECONDS = 0.001
"""Seconds between two rounds at a boundary where a member waits to leave."""


class FoundAgain(Exception):
    """All members have announced themselves at a new rendezvous, and are to continue there."""

    def __init__(self, enrolled: Enrolled) -> None:
        self.enrolled = enrolled


class HasLeft(Exception):
    """This member has left, as it asked to."""


class Member:
    """One process as a worker of the rendezvous at ``address``. Only `abort` may be called from other threads.

    ``enrollment`` is given the size of the group, and the seconds for which this member announces itself again.
    """

    def __init__(
        self,
        enrolled: Enrolled,
        state: RunState,
        *,
        address: str,
        timeout: float,
        enrollment: Callable[[int, float], Enrollment],
    ) -> None:
        sock, welcome = enrolled
        self.number: int = welcome.worker
        self.state = state
        self.is_closed = False
        self._address = address
        self._config = WorkerConfig(
            job=welcome.group,
            worker=welcome.worker,
            script="",
            directory=os.getcwd(),
            host=sock.getsockname()[0],
            storage="",
            detection_seconds=welcome.detection_seconds,
        )
        self._is_removed = self._is_rendezvous_lost = self._awaits_rendezvous = False
        self._enrollment = enrollment
        self._reenrollment: Reenrollment | None = None
        self._round = 0
        self._open_round: ExchangeRound | None = None
        self._call = ""
        self._progress_sent = 0.0
        self._poller = LinkPoller()
        self._thread = ControlThread(self._config, sock, self._poller, exit_process=self._on_disconnected)
        self._control = self._thread.control
        self._session = WorkerSession(self._config, self._control, self._poller, leave=_raise_left)
        self._watchdog = Watchdog(timeout, self._on_timeout)

    @property
    def view(self) -> View:
        """The current generation."""
        return self._session.view

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Run a call of the user under the watchdog; an error after which this member cannot go on closes it.

        The state is intact after the loss of a member, and after calls that differ. A state that cannot be sent is one
        that others wait for.
        """
        if self.is_closed:
            raise UsageError(f"{name}: this member has left the group; call join() again")
        self._call = name
        self._watchdog.begin()
        try:
            yield
        except StateError:
            self.close()
            raise
        except (UsageError, CallsDiffer, MemberLost):
            raise
        except Withdrawn as withdrawn:
            self.close()
            raise Removed from withdrawn
        except BaseException:
            self.close()
            raise
        finally:
            self._watchdog.end()
            self._call = ""

    def join(self, digest: str, *, num_shards: int, enrollment: Enrollment) -> None:
        """Become a member: with the others of the start, or with the state of a member."""
        ready = Ready(
            worker=self.number,
            iterations_total=MAX_NUMBER,
            num_shards=num_shards,
            batch_size=num_shards,
            epochs=1,
            samples=num_shards,
            bits="same bits",
        )
        self._watchdog.begin(enrollment.deadline)
        self._call = "join()"
        try:
            self._thread.start()
            with self._needing_rendezvous():
                is_initial = self._session.join(ready, self.state)
            if is_initial:
                self._compare_states(digest)
            else:
                self._enter_generation()
        except Withdrawn as withdrawn:
            raise Removed from withdrawn
        except MemberTimeout as error:
            raise enrollment.timed_out("the other members could not be reached") from error
        finally:
            self._watchdog.end()

    def _compare_states(self, digest: str) -> None:
        headers = None
        while headers is None:
            try:
                headers, _ = self._exchange_headers(CallHeader(self.view.generation, "join()", digest=digest))
            except Abandoned as lost:
                self.recover(lost)
        self._enter_generation()
        _, who = minority([header.digest for header in headers], self.view.workers)
        if who:
            self._await_all()
            raise MembersDiffer(
                f"member{who.removeprefix('worker')} joined with another state than the others: initial members bring "
                "the same one. Seed them alike, or load the same file"
            )

    def pass_boundary(self, call: str, *, is_leaving: bool) -> bool:
        """Take part in rounds until nobody waits to join or leave; True if all members leave here.

        Raises FoundAgain, on all members, if they are to continue at a new rendezvous.
        """
        has_asked = False
        while True:
            try:
                generation = self._session.named(self.state.progress.iteration)
                headers, tag = self._exchange_headers(CallHeader(generation, call, is_leaving, self._is_enrolled()))
                self._compare(headers)
                switch = self._session.agreed([header.generation for header in headers])
                if switch is not None:
                    self._session.switch(switch, tag, self.state)
                    self._enter_generation()
                    continue
            except Abandoned as lost:
                self.recover(lost)
                continue
            if all(header.is_leaving for header in headers):
                return True
            if all(header.is_enrolled for header in headers):
                self._move()
            if not any(header.is_leaving for header in headers):
                self._report_progress()
                return False
            if is_leaving and not has_asked:
                self._awaits_rendezvous = has_asked = True
                self._check_rendezvous()
                self._session.report(LeaveRequested())
            time.sleep(IDLE_SECONDS)

    def _is_enrolled(self) -> bool:
        """Whether this member could continue at a new rendezvous. After the loss of its own it looks for one."""
        if self._is_rendezvous_lost and self._reenrollment is None:
            self._reenrollment = Reenrollment(lambda seconds: self._enrollment(self.view.size, seconds))
        return self._reenrollment is not None and self._reenrollment.is_enrolled

    def _move(self) -> NoReturn:
        self._await_all()
        enrolled = self._reenrollment.take() if self._reenrollment else None
        if enrolled is None:
            raise RendezvousLost(self._address)
        raise FoundAgain(enrolled)

    def leave(self, call: str) -> None:
        """Take part in rounds until a generation without this member is active, or all members leave."""
        with suppress(HasLeft):
            self.pass_boundary(call, is_leaving=True)
            self._session.report(GroupEnded(members=self.view.workers))
            self._session.leave_together()

    def agree(self, call: str) -> None:
        """Compare the call with those of the others. Raises CallsDiffer, on all of them, and Abandoned."""
        headers, _ = self._exchange_headers(CallHeader(self.view.generation, call))
        self._compare(headers)

    def reduce(self, given: Contributions, held: tuple[tuple[Interval, ...], ...], num_leaves: int) -> None:
        """Add up the contributions of all members. Raises Abandoned."""
        self._run_round(RoundSpec(self._next_tag(), self.view.workers, held, num_leaves, given.partials, given.sums))

    def recover(self, lost: Abandoned) -> None:
        """Become a member of a generation without the lost one, with the state of those that are furthest ahead."""
        with self._needing_rendezvous():
            self._session.recover(lost, next_round=self.state.progress.iteration, state=self.state)
        self._enter_generation()

    def abort(self, reason: str) -> None:
        """Leave at once, from any thread."""
        self._control.fail(Aborted(reason))
        self._control.close_links()
        self._control.end()

    def close(self) -> None:
        """Close all connections: members that count on this one lose it."""
        if not self.is_closed:
            self.is_closed = True
            self._watchdog.close()
            if self._reenrollment is not None:
                self._reenrollment.close()
            self._thread.stop()
            self._poller.close()
            self._session.close()

    # rounds

    def _next_tag(self) -> Tag:
        self._round += 1
        return Tag(self.view.generation, self._round)

    def _exchange_headers(self, header: CallHeader) -> tuple[list[CallHeader], Tag]:
        tag = self._next_tag()
        nothing = RoundSpec(tag, self.view.workers, ((),) * self.view.size, 0, (), ())
        return [CallHeader.decode(data) for data in self._run_round(nothing, header.encode())], tag

    def _run_round(self, spec: RoundSpec, header: bytes = b"") -> Sequence[bytes]:
        self._open_round = self._session.begin(spec)
        try:
            for bucket in range(len(spec.sums)):
                self._open_round.push(bucket)
            return self._open_round.finish(header)
        finally:
            self._open_round = None

    def _compare(self, headers: Sequence[CallHeader]) -> None:
        calls = [header.call for header in headers]
        common, who = minority(calls, self.view.workers)
        if who:
            self._await_all()
            other = next(call for call in calls if call != common)
            raise CallsDiffer(who.replace("worker", "member"), other, str(common))

    def _await_all(self) -> None:
        """Wait until all members have all headers, or are lost: one that ends now must not abort their round."""
        with suppress(Abandoned):
            self._exchange_headers(CallHeader(self.view.generation, ""))

    # the membership

    def _enter_generation(self) -> None:
        """Report that this member is one of the current generation, whose rounds count from 0."""
        self._round = 0
        view, iteration = self.view, self.state.progress.iteration
        if view.rank:
            self._session.report(Joined(worker=view.me, generation=view.generation, iteration=iteration))
        else:
            self._session.report(
                Switched(worker=view.me, generation=view.generation, workers=view.workers, iteration=iteration)
            )

    def _report_progress(self) -> None:
        """As the first rank, report how many iterations are complete, a few times a second at most."""
        view, now = self.view, time.monotonic()
        if view.rank == 0 and now - self._progress_sent >= PROGRESS_SECONDS:
            self._progress_sent = now
            iteration = self.state.progress.iteration
            self._session.report(Progress(worker=view.me, generation=view.generation, iteration=iteration, epoch=0))

    @contextmanager
    def _needing_rendezvous(self) -> Iterator[None]:
        """Run what cannot end without the rendezvous. Raises RendezvousLost."""
        self._awaits_rendezvous = True
        self._check_rendezvous()
        try:
            yield
        finally:
            self._awaits_rendezvous = False

    def _check_rendezvous(self) -> None:
        if self._is_rendezvous_lost:
            raise RendezvousLost(self._address)

    # other threads

    def _on_disconnected(self, status: int) -> None:
        """On the control thread: the rendezvous has removed this member (status 0), or is gone."""
        if status == 0:
            self._is_removed = True
            self._control.fail(Removed())
        elif not self._is_removed:
            self._is_rendezvous_lost = True
            if self._awaits_rendezvous:
                self._control.fail(RendezvousLost(self._address))

    def _on_timeout(self) -> None:
        """On the watchdog's thread: the call lasts too long."""
        open_round = self._open_round
        missing = open_round.missing if open_round is not None else ()
        self._control.fail(MemberTimeout(self._watchdog.seconds, self._call, missing))


def _raise_left() -> NoReturn:
    raise HasLeft
