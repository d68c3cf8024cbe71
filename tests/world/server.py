"""The simulated nats-server with JetStream: what of it Resile uses, with the real semantics.

Core messages reach those who are subscribed at the moment. A stream's messages are stored before they are acknowledged,
and survive a restart; the ids of messages are remembered for a while, so that none is stored twice; a write that
expects another revision is refused, before duplicates are looked for. Consumers live in memory.
"""

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import orjson

from .loop import SimLoop

HEARTBEAT_SECONDS = 5.0
WRONG_LAST_SEQUENCE = 10071
NUM_IDS = 20_000
_NANOSECONDS = 1e9
LARGE = b"num_samples"
"""What the arguments of every script have, which make a record too large where it is refused."""
_REFUSAL = {"error": {"code": 400, "err_code": 10054, "description": "message size exceeds maximum allowed"}}


@dataclass(frozen=True)
class Place:
    """Where in a stream a message is stored."""

    stream: int
    consumer: int = 0


@dataclass(frozen=True)
class Metadata:
    """What the library's ``Msg.metadata`` has."""

    sequence: Place
    num_delivered: int
    num_pending: int
    stream: str
    consumer: str


@dataclass
class Message:
    """A message, with the attributes of the library's ``Msg``."""

    subject: str
    data: bytes
    headers: dict[str, str] | None = None
    reply: str = ""
    metadata: Any = None


class Peer(Protocol):
    """A client, as the server sees it."""

    def deliver(self, subscription: int, message: Message) -> None:
        """Send it a message for one of its subscriptions."""


@dataclass
class Stored:
    """One message of a stream."""

    sequence: int
    subject: str
    data: bytes
    headers: dict[str, str]
    size: int


@dataclass
class Pull:
    """A request for messages, as long as it is open."""

    reply: str
    batch: int
    expires: float
    active: float


@dataclass
class Consumer:
    """A reader's position in a stream."""

    name: str
    filters: tuple[str, ...]
    next: int
    only: deque[int] | None = None
    """The sequences with which it starts, for ``last_per_subject``."""
    pulls: deque[Pull] = field(default_factory=deque)

    def matches(self, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in self.filters)


class Stream:
    """The messages of one stream."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.name: str = configuration["name"]
        self.subjects: list[str] = configuration["subjects"]
        self.per_subject: int = configuration.get("max_msgs_per_subject", -1)
        self.max_bytes: int = configuration.get("max_bytes", -1)
        self.is_synced = configuration.get("persist_mode") != "async"
        self.last = 0
        self.messages: OrderedDict[int, Stored] = OrderedDict()
        self.by_subject: dict[str, deque[int]] = {}
        self.ids: OrderedDict[str, int] = OrderedDict()
        self.consumers: dict[str, Consumer] = {}
        self.num_bytes = 0

    def store(self, subject: str, data: bytes, headers: dict[str, str]) -> dict[str, Any]:
        """Store a message; return the answer to its publisher."""
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        newest = self.newest(headers.get("Nats-Expected-Last-Subject-Sequence-Subject", subject))
        if expected is not None and int(expected) != (newest.sequence if newest else 0):
            error = {"code": 400, "err_code": WRONG_LAST_SEQUENCE, "description": "wrong last sequence"}
            return {"error": error}
        message_id = headers.get("Nats-Msg-Id")
        if message_id is not None and message_id in self.ids:
            return {"stream": self.name, "seq": self.ids[message_id], "duplicate": True}
        if headers.get("Nats-Rollup") == "sub":
            self.purge(subject)
        self.last += 1
        size = len(data) + sum(len(k) + len(v) for k, v in headers.items())
        self.messages[self.last] = Stored(self.last, subject, data, headers, size)
        self.num_bytes += size
        sequences = self.by_subject.setdefault(subject, deque())
        sequences.append(self.last)
        if message_id is not None:
            self.ids[message_id] = self.last
            if len(self.ids) > NUM_IDS:
                self.ids.popitem(last=False)
        if 0 < self.per_subject < len(sequences):
            self.remove(sequences[0])
        while 0 < self.max_bytes < self.num_bytes:
            self.remove(next(iter(self.messages)))
        return {"stream": self.name, "seq": self.last}

    def newest(self, subject: str) -> Stored | None:
        found = [subject] if "*" not in subject else [known for known in self.by_subject if matches(subject, known)]
        newest = max((sequences[-1] for name in found if (sequences := self.by_subject.get(name))), default=None)
        return None if newest is None else self.messages[newest]

    def remove(self, sequence: int) -> None:
        stored = self.messages.pop(sequence)
        self.num_bytes -= stored.size
        sequences = self.by_subject[stored.subject]
        sequences.remove(sequence)
        if not sequences:
            del self.by_subject[stored.subject]

    def purge(self, pattern: str) -> int:
        gone = [s.sequence for s in self.messages.values() if matches(pattern, s.subject)]
        for sequence in gone:
            self.remove(sequence)
        return len(gone)

    def forget_after(self, sequence: int) -> None:
        """Lose the newest messages, as a machine does that fails before they are synced."""
        for stored in [s for s in self.messages.values() if s.sequence > sequence]:
            self.remove(stored.sequence)
        self.ids = OrderedDict((name, number) for name, number in self.ids.items() if number <= sequence)
        self.last = min(self.last, sequence)
        for consumer in self.consumers.values():
            consumer.next = min(consumer.next, sequence + 1)


@lru_cache(maxsize=20_000)
def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern with ``*`` and ``>``."""
    if pattern == subject:
        return True
    if "*" not in pattern and ">" not in pattern:
        return False
    return _compiled(pattern).fullmatch(subject) is not None


@lru_cache(maxsize=20_000)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = (r"[^.]+" if token == "*" else ".+" if token == ">" else re.escape(token) for token in pattern.split("."))
    return re.compile(r"\.".join(parts))


class SimServer:
    """The server. Clients hand it messages with `receive`, in order, and get what it sends by `Peer.deliver`."""

    def __init__(self, loop: SimLoop) -> None:
        self.is_up = True
        self.streams: dict[str, Stream] = {}
        self.num_messages = 0
        self.on_stop: list[Callable[[], None]] = []
        self.on_store: list[Callable[[Stored], None]] = []
        """Called with every message that is stored, for checks."""
        self.copies: Callable[[], tuple[float, ...]] | None = None
        """Draws after how many seconds each copy of the next message arrives that is not stored; () loses it."""
        self.seconds: Callable[[], float] | None = None
        """Draws after how many seconds the next message that is stored is acknowledged; None: at once."""
        self.refused: frozenset[str] = frozenset()
        """Subjects on which nothing is stored that contains `LARGE`."""
        self.full: frozenset[str] = frozenset()
        """Subjects on which nothing is stored."""
        self._loop = loop
        self._subscriptions: dict[int, tuple[Peer, str, str]] = {}
        self._routes: dict[str, list[int]] = {}
        self._inboxes: dict[str, int] = {}
        self._number = 0
        self._turn = 0
        self._by_token: dict[str, Stream | None] = {}
        self._synced: dict[str, int] = {}

    # connections

    def subscribe(self, peer: Peer, subject: str, queue: str) -> int:
        self._number += 1
        self._subscriptions[self._number] = (peer, subject, queue)
        if subject.startswith("_INBOX"):
            self._inboxes[subject.removesuffix(".*")] = self._number
        else:
            self._routes.clear()
        return self._number

    def unsubscribe(self, number: int) -> None:
        if number in self._subscriptions:
            _, subject, _ = self._subscriptions.pop(number)
            self._inboxes.pop(subject.removesuffix(".*"), None)
            self._routes.clear()

    def disconnect(self, peer: Peer) -> None:
        for number in [n for n, (other, _, _) in self._subscriptions.items() if other is peer]:
            self.unsubscribe(number)

    def stop(self, *, loses_unsynced: bool = False) -> None:
        """End the server at once."""
        self.is_up = False
        self._subscriptions.clear()
        self._routes.clear()
        self._inboxes.clear()
        for stream in self.streams.values():
            for consumer in stream.consumers.values():
                consumer.pulls.clear()
            stream.consumers.clear()
            if loses_unsynced and not stream.is_synced:
                stream.forget_after(self._synced.get(stream.name, 0))
        for call in tuple(self.on_stop):
            call()

    def start(self) -> None:
        self.is_up = True

    def sync(self) -> None:
        """Write everything to the disk."""
        self._synced = {stream.name: stream.last for stream in self.streams.values()}

    # messages

    def receive(self, subject: str, data: bytes, headers: dict[str, str] | None, reply: str) -> bool:
        """Handle one message; return whether anybody got it."""
        self.num_messages += 1
        if subject.startswith("$JS."):
            self._call_api(subject, data, reply)
            return True
        stream = self._stream_of(subject)
        if stream is not None:
            is_refused = subject in self.full or (subject in self.refused and LARGE in data)
            answer = _REFUSAL if is_refused else stream.store(subject, data, headers or {})
            if "error" not in answer and "duplicate" not in answer:
                for call in self.on_store:
                    call(stream.messages[answer["seq"]])
                self._serve(stream)
            if reply and self.seconds is not None:
                self._loop.call_later(self.seconds(), self._answer, reply, answer, context=Context())
            elif reply:
                self._answer(reply, answer)
        elif self.copies and not subject.startswith("_INBOX"):
            for seconds in self.copies():
                if reply and seconds:
                    continue  # a request is lost, but does not come when its sender has long given it up
                self._loop.call_later(seconds, self._publish, subject, data, headers, reply, context=Context())
            return True
        return self._publish(subject, data, headers, reply) or stream is not None

    def _publish(self, subject: str, data: bytes, headers: dict[str, str] | None, reply: str) -> bool:
        numbers = self._route(subject)
        groups: dict[str, list[int]] = {}
        for number in numbers:
            peer, _, queue = self._subscriptions[number]
            if queue:
                groups.setdefault(queue, []).append(number)
            else:
                peer.deliver(number, Message(subject, data, headers, reply))
        for members in groups.values():
            self._turn += 1
            number = members[self._turn % len(members)]
            self._subscriptions[number][0].deliver(number, Message(subject, data, headers, reply))
        return bool(numbers)

    def _route(self, subject: str) -> list[int]:
        if subject.startswith("_INBOX"):
            number = self._inboxes.get(subject.rpartition(".")[0])
            return [] if number is None else [number]
        if subject not in self._routes:
            if len(self._routes) > 5000:
                self._routes.clear()
            self._routes[subject] = [n for n, (_, p, _) in self._subscriptions.items() if matches(p, subject)]
        return self._routes[subject]

    def _stream_of(self, subject: str) -> Stream | None:
        token = ".".join(subject.split(".")[:2])
        if token not in self._by_token:
            found = (s for s in self.streams.values() if any(matches(p, subject) for p in s.subjects))
            self._by_token[token] = next(found, None)
        return self._by_token[token]

    def _answer(self, reply: str, answer: dict[str, Any]) -> None:
        self._publish(reply, orjson.dumps(answer), None, "")

    # JetStream's API

    def _call_api(self, subject: str, data: bytes, reply: str) -> None:
        tokens = subject.split(".")
        match tokens[2:]:
            case ["STREAM", "CREATE" | "UPDATE" as verb, name]:
                known = self.streams.get(name)
                if known is None:
                    self.streams[name] = Stream(orjson.loads(data))
                    self._by_token.clear()
                error = {"code": 400, "err_code": 10058, "description": "stream name already in use"}
                self._answer(reply, {"error": error} if known and verb == "CREATE" else {"config": {}})
            case ["STREAM", "PURGE", name]:
                pattern = orjson.loads(data or b"{}").get("filter", ">")
                self._answer(reply, {"success": True, "purged": self.streams[name].purge(pattern)})
            case ["STREAM", "INFO", name]:
                self._answer(reply, self._info(name))
            case ["DIRECT", "GET", name, *rest]:
                subject = ".".join(rest) or orjson.loads(data)["last_by_subj"]
                self._get(self.streams[name], subject, reply)
            case ["CONSUMER", "CREATE", name, consumer, *_]:
                self._answer(reply, self._create_consumer(self.streams.get(name), consumer, orjson.loads(data)))
            case ["CONSUMER", "MSG", "NEXT", name, consumer]:
                self._pull(self.streams.get(name), consumer, orjson.loads(data), reply)
            case _:
                raise NotImplementedError(subject)

    def _info(self, name: str) -> dict[str, Any]:
        stream = self.streams.get(name)
        if stream is None:
            return {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}
        first = next(iter(stream.messages), stream.last + 1)
        state = {"first_seq": first, "last_seq": stream.last, "messages": len(stream.messages)}
        return {"config": {}, "state": state | {"bytes": stream.num_bytes}}

    def _get(self, stream: Stream, subject: str, reply: str) -> None:
        stored = stream.newest(subject)
        if stored is None:
            self._publish(reply, b"", {"Status": "404"}, "")
        else:
            headers = {**stored.headers, "Nats-Sequence": str(stored.sequence), "Nats-Subject": stored.subject}
            headers["Nats-Time-Stamp"] = "2026-01-01T00:00:00.000Z"
            self._publish(reply, stored.data, headers, "")

    def _create_consumer(self, stream: Stream | None, name: str, request: dict[str, Any]) -> dict[str, Any]:
        if stream is None:
            return {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}
        configuration = request["config"]
        if name not in stream.consumers:
            stream.consumers[name] = self._new_consumer(stream, name, configuration)
        consumer = stream.consumers[name]
        delivered = {"stream_seq": consumer.next - 1}
        return {"delivered": delivered, "num_pending": sum(1 for _ in self._waiting(stream, consumer))}

    def _new_consumer(self, stream: Stream, name: str, configuration: dict[str, Any]) -> Consumer:
        policy = configuration["deliver_policy"]
        consumer = Consumer(name, tuple(configuration["filter_subjects"]), next=1)
        match policy:
            case "by_start_sequence":
                consumer.next = configuration["opt_start_seq"]
            case "new":
                consumer.next = stream.last + 1
            case "last_per_subject":
                newest = (s[-1] for subject, s in stream.by_subject.items() if consumer.matches(subject))
                consumer.only, consumer.next = deque(sorted(newest)), stream.last + 1
        return consumer

    def _waiting(self, stream: Stream, consumer: Consumer) -> Iterator[int]:
        """The sequences that are still to be delivered for the first time."""
        yield from (n for n in consumer.only or () if n in stream.messages)
        for number in range(consumer.next, stream.last + 1):
            stored = stream.messages.get(number)
            if stored is not None and consumer.matches(stored.subject):
                yield number

    def _pull(self, stream: Stream | None, name: str, request: dict[str, Any], reply: str) -> None:
        consumer = stream.consumers.get(name) if stream else None
        if stream is None or consumer is None:
            self._publish(reply, b"", {"Status": "409"}, "")
            return
        pull = Pull(reply, request["batch"], self._loop.now + request["expires"] / _NANOSECONDS, self._loop.now)
        consumer.pulls.append(pull)
        self._serve_consumer(stream, consumer)
        self._keep_alive(stream, consumer, pull)

    def _keep_alive(self, stream: Stream, consumer: Consumer, pull: Pull) -> None:
        """Send idle heartbeats, and the end of the request."""
        if pull not in consumer.pulls or not self.is_up:
            return
        if not self._route(pull.reply):
            consumer.pulls.remove(pull)
        elif self._loop.now >= pull.expires:
            consumer.pulls.remove(pull)
            self._publish(pull.reply, b"", {"Status": "408"}, "")
        else:
            self._serve_consumer(stream, consumer)
            if self._loop.now - pull.active >= HEARTBEAT_SECONDS:
                pull.active = self._loop.now
                self._publish(pull.reply, b"", {"Status": "100"}, "")
            self._loop.call_later(HEARTBEAT_SECONDS, self._keep_alive, stream, consumer, pull)

    def _serve(self, stream: Stream) -> None:
        for consumer in list(stream.consumers.values()):
            if consumer.pulls:
                self._serve_consumer(stream, consumer)

    def _serve_consumer(self, stream: Stream, consumer: Consumer) -> None:
        while consumer.pulls and (number := self._next(stream, consumer)) is not None:
            pull = consumer.pulls[0]
            if not self._route(pull.reply):
                consumer.pulls.popleft()
                continue
            self._advance(consumer, number)
            self._deliver(stream, consumer, pull, stream.messages[number])
            pull.batch -= 1
            pull.active = self._loop.now
            if pull.batch <= 0:
                consumer.pulls.popleft()

    def _next(self, stream: Stream, consumer: Consumer) -> int | None:
        if consumer.only is not None and (number := next((n for n in consumer.only if n in stream.messages), None)):
            return number
        while consumer.next <= stream.last:
            stored = stream.messages.get(consumer.next)
            if stored is not None and consumer.matches(stored.subject):
                return consumer.next
            consumer.next += 1
        return None

    def _advance(self, consumer: Consumer, number: int) -> None:
        if consumer.only and number == consumer.only[0]:
            consumer.only.popleft()
        elif consumer.only is not None and number in consumer.only:
            consumer.only.remove(number)
        elif number >= consumer.next:
            consumer.next = number + 1

    def _deliver(self, stream: Stream, consumer: Consumer, pull: Pull, stored: Stored) -> None:
        metadata = Metadata(
            sequence=Place(stored.sequence),
            num_delivered=1,
            num_pending=max(0, stream.last - stored.sequence),
            stream=stream.name,
            consumer=consumer.name,
        )
        for number in self._route(pull.reply):
            peer = self._subscriptions[number][0]
            reply = f"$JS.ACK.{stream.name}.{consumer.name}.{stored.sequence}"
            peer.deliver(number, Message(stored.subject, stored.data, stored.headers or None, reply, metadata))
