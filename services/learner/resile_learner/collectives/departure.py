"""How a worker leaves: after others have confirmed its last round, and without losing anything on its links."""

from collections.abc import Callable, Iterable

from .frames import Kind, encode
from .link import DiscardSink, DrainSink, Link
from .poller import LinkPoller
from .spec import Tag


class LeaveAcknowledgement:
    """Both sides of a leave: a member that stays confirms, and a member that leaves waits for that."""

    def __init__(self, poller: LinkPoller) -> None:
        self._poller = poller

    def confirm(self, peer: int, tag: Tag) -> None:
        """Confirm to ``peer`` that the round of ``tag`` is committed here; no effect if it has gone."""
        for link in self._poller.links_to([peer]):
            link.send_urgent(encode(Kind.CONFIRM, tag))
            self._poller.flush(link)

    def await_confirmations(
        self, peers: Iterable[int], tag: Tag, *, obsolete: Callable[[], bool] = lambda: False
    ) -> frozenset[int]:
        """Wait until each of ``peers`` has confirmed the round of ``tag`` or a later one, or has gone.

        Stops early once ``obsolete()``, which is checked after each ``wake``. Returns the peers that have confirmed.
        """
        links = self._poller.links_to(peers)
        drain = DrainSink(self._poller.newest_tag)

        def has_confirmed(link: Link) -> bool:
            return link.confirmed is not None and link.confirmed >= tag

        def unconfirmed() -> list[Link]:
            return [link for link in links if not link.closed and not has_confirmed(link)]

        self._poller.serve(unconfirmed, lambda _: drain, lambda: not unconfirmed() or obsolete())
        return frozenset(link.peer for link in links if has_confirmed(link))

    def close_gracefully(self, peers: Iterable[int]) -> None:
        """Send what is pending and the end of the stream to ``peers``, and wait until they have closed their ends."""
        links = self._poller.links_to(peers)
        ended: set[Link] = set()
        discard = DiscardSink()

        def all_closed() -> bool:
            for link in links:
                if not link.closed and not link.pending and link not in ended:
                    ended.add(link)
                    link.write_eof()
            return all(link.closed for link in links)

        self._poller.serve(lambda: [link for link in links if not link.closed], lambda _: discard, all_closed)
