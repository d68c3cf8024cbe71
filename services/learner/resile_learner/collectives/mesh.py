"""The exchange over TCP: one link to every peer, kept from generation to generation; a round is a view of the links.

All moving of data is done by the thread that calls, the worker's main thread. Other threads add and remove links, make
it give up a round, or interrupt it.
"""

import socket
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from ..state.flat import Allocate
from .exchange import Abandoned, RoundSpec, Tag
from .frames import Kind, encode
from .handover import Reception, outgoing
from .link import BrokenLink, Link, Remains, Sink
from .memory import Scratch
from .round import OpenMeshRound
from .switchboard import Suspicion, Switchboard


class Mesh:
    """Implements ``Exchange``; also hands state over and lets peers go.

    ``add_link``, ``remove_link``, ``abandon`` and ``interrupt`` may be called from any thread, the rest from one.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self._switchboard = Switchboard()
        self._scratch = Scratch()
        self._open: OpenMeshRound | None = None
        self._newest: Tag | None = None

    def add_link(self, peer: int, sock: socket.socket) -> None:
        """Take over a connected and authenticated socket to ``peer``; an older link to it is cut. From any thread."""
        self._switchboard.add(Link(peer, sock))

    def remove_link(self, peer: int) -> None:
        """Cut the link to ``peer``; an exchange with it that is under way ends. From any thread."""
        self._switchboard.remove(peer)

    @property
    def links(self) -> frozenset[int]:
        """The peers with a link that is not known to be broken."""
        return frozenset(self._switchboard.links)

    def close(self) -> None:
        """Cut all links."""
        self._switchboard.close()

    def begin(self, spec: RoundSpec) -> OpenMeshRound:
        """See ``Exchange.begin``. A round left open is given up."""
        self._leave_round()
        self._newest = spec.tag
        self._switchboard.forget_suspicion_unless(generation=spec.tag.generation, members=spec.members)
        self._open = OpenMeshRound(self._switchboard, self._scratch, spec, self.worker)
        return self._open

    def _leave_round(self) -> None:
        """Give up a round that the caller has left without finishing it."""
        if self._open is not None:
            self._open.fail(self.worker, "it left the round open")
            self._open = None

    def abandon(self, suspect: int, reason: str, *, generation: int | None = None) -> None:
        """See ``Exchange.abandon``.

        It concerns rounds of ``generation`` alone, by default that of the newest round. When none is open, the next one
        is abandoned if it is of that generation and ``suspect`` is a member. From any thread.
        """
        newest = self._newest.generation if self._newest else None
        self._switchboard.suspect(Suspicion(suspect, reason, newest if generation is None else generation))

    def interrupt(self, error: BaseException) -> None:
        """Make the blocking call that is under way, or else the next one, raise ``error``. From any thread."""
        self._switchboard.interrupt(error)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Send what is left to be sent until ``ready()`` holds; it is asked again after each ``wake``.

        What still comes of rounds that this worker has left is thrown away: whoever sends it can leave them too.
        """
        remains = self._remains()
        self._serve(lambda: self._switchboard.links.values(), lambda _: remains, ready)

    def wake(self) -> None:
        """Make ``wait_until`` look again. From any thread."""
        self._switchboard.wake()

    def send_state(
        self,
        peer: int,
        generation: int,
        skeleton: bytes,
        tensors: Sequence[Tensor],
        *,
        obsolete: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hand the state of ``generation`` to ``peer``: a description, and the bytes of ``tensors`` in their order.

        Raises Abandoned if the link is missing, breaks or is removed, or when ``obsolete()``, which is asked again
        after each ``wake``.
        """
        link = self._switchboard.links.get(peer)
        if link is None:
            raise Abandoned(peer, "there is no link to it")
        try:
            for frame in outgoing(generation, skeleton, tensors):
                link.send(*frame)
                link.flush()
                self._serve(tuple, _unheard, lambda: not link.pending or link.closed or obsolete())
                if link.closed:
                    raise Abandoned(peer, "its link was lost while state was handed to it")
                if link.pending:
                    raise Abandoned(peer, "the state that was handed to it is not needed any more")
        except BrokenLink as broken:
            self._switchboard.drop(link)
            raise Abandoned(peer, broken.reason) from broken
        finally:
            link.cut_short()

    def receive_state(
        self,
        allocate: Allocate,
        *,
        generation: int = 0,
        donor: int | None = None,
        obsolete: Callable[[], bool] = lambda: False,
    ) -> tuple[int, int]:
        """Wait for a state over any link and receive it into the tensors that ``allocate`` makes for its skeleton.

        Returns the peer that sent it and its generation. Frames of rounds that this worker has not begun stay on their
        links, unless they are of an older generation than ``generation``. A donor that is lost half-way is forgotten.
        Raises StateMismatch if the tensors have another size than the state; Abandoned when ``donor``, if it is named,
        is lost, or when ``obsolete()``, which is asked again after each ``wake``.
        """
        reception = Reception(allocate, newest=self._newest, generation=generation)

        def ended() -> bool:
            if reception.received is not None:
                return True
            if donor is not None and donor not in self._switchboard.links:
                raise Abandoned(donor, "its link was lost while it handed its state over")
            return obsolete()

        try:
            self._serve(
                lambda: reception.heard(self._switchboard.links.values()),
                reception.inlet,
                ended,
            )
            if reception.received is None:
                raise Abandoned(self.worker if donor is None else donor, "its state is not needed any more")
            return reception.received
        finally:
            reception.end()

    def confirm(self, peer: int, tag: Tag) -> None:
        """Tell ``peer`` that the round of ``tag`` is committed here; nothing if it has gone."""
        link = self._switchboard.links.get(peer)
        if link is not None:
            link.notify(encode(Kind.CONFIRM, tag))
            self._switchboard.flush(link)

    def await_confirms(
        self, peers: Iterable[int], tag: Tag, *, obsolete: Callable[[], bool] = lambda: False
    ) -> frozenset[int]:
        """Wait until each of ``peers`` has confirmed the round of ``tag`` or a later one, or has gone.

        Or until ``obsolete()``, which is asked again after each ``wake``. Returns those that have confirmed.
        """
        links = self._links_to(peers)
        remains = self._remains()

        def has_confirmed(link: Link) -> bool:
            return link.confirmed is not None and link.confirmed >= tag

        def unconfirmed() -> list[Link]:
            return [link for link in links if not link.closed and not has_confirmed(link)]

        self._serve(unconfirmed, lambda _: remains, lambda: not unconfirmed() or obsolete())
        return frozenset(link.peer for link in links if has_confirmed(link))

    def let_go(self, peers: Iterable[int]) -> None:
        """Say to ``peers`` that nothing more will come, wait until they have closed their ends, and close the links."""
        links = self._links_to(peers)
        ended: set[Link] = set()
        remains = Remains(lambda _: True)

        def gone() -> bool:
            for link in links:
                if not link.closed and not link.pending and link not in ended:
                    ended.add(link)
                    link.end_sending()
            return all(link.closed for link in links)

        self._serve(lambda: [link for link in links if not link.closed], lambda _: remains, gone)

    def _remains(self) -> Remains:
        newest = self._newest
        return Remains(lambda tag: newest is not None and tag <= newest)

    def _links_to(self, peers: Iterable[int]) -> list[Link]:
        known = self._switchboard.links
        return [known[peer] for peer in peers if peer in known]

    def _serve(
        self, listening: Callable[[], Iterable[Link]], sink: Callable[[Link], Sink], done: Callable[[], bool]
    ) -> None:
        """Move frames between rounds until ``done()``; a link that breaks is dropped."""
        self._leave_round()
        board = self._switchboard
        board.listen(())
        while True:
            board.attend()
            links = list(listening())
            board.listen(links)
            for link in links:
                board.move(link, sink(link))
            if done():
                return
            if list(listening()) == links:
                board.wait()


def _unheard(link: Link) -> Sink:
    raise AssertionError(f"nobody listens to worker {link.peer}")
