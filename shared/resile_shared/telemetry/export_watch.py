"""What becomes of exported telemetry, in the log: where it goes, that a collector does not take it and why, since when.

The exporters of OpenTelemetry log several lines for each attempt, with the insides of their libraries. Theirs are
caught here, and their cause is said once, in words.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)

REMIND_SECONDS = 600.0
"""Between two lines that say how much was lost, while a collector takes nothing."""
_LIBRARIES = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
_MAX_REASON = 200
_WORDS = (
    (r"code: (?:404|405)\b", "it answers that there is no such path: check that of the endpoint"),
    (r"code: 40[13]\b|UNAUTHENTICATED|PERMISSION_DENIED", "it refuses access: check OTEL_EXPORTER_OTLP_HEADERS"),
    (
        r"code: (?:429|50[234])\b|RESOURCE_EXHAUSTED|Service Unavailable|Too Many Requests",
        "it is overloaded or not ready",
    ),
    (r"code: (?P<code>[45]\d\d)\b", "it answers {code}: is it a collector of OTLP?"),
    (r"Connection refused|ECONNREFUSED", "connection refused: no collector listens there"),
    (r"UNIMPLEMENTED", "it does not take this kind of telemetry, or does not speak OTLP over gRPC"),
    (
        r"http1\.x server|parsing HTTP/2|unexpected protocol|RST_STREAM",
        "it does not speak OTLP over gRPC: is OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, with its port, meant?",
    ),
    (
        r"BadStatusLine|RemoteDisconnected|IncompleteRead|ProtocolError|Connection aborted",
        "it does not speak HTTP, or closed the connection: is OTEL_EXPORTER_OTLP_PROTOCOL=grpc meant?",
    ),
    (r"NameResolutionError|Name or service not known|getaddrinfo|hostname lookup", "its host name cannot be resolved"),
    (
        r"No connection adapters|MissingSchema|Invalid URL",
        "the endpoint is not a URL: begin it with http:// or https://",
    ),
    (
        r"SSLError|CERTIFICATE_VERIFY|[Hh]andshake",
        "no secure connection: check its certificate, and http:// or https://",
    ),
    (r"unreachable|No route|UNAVAILABLE", "it cannot be reached"),
    (r"[Tt]imed? ?out|DEADLINE_EXCEEDED", "it does not answer in time"),  # last: the end of all attempts says timeout
)
"""What is found in the messages of the libraries, and what that means; the first that fits counts."""


class Exporter(Protocol):
    """An exporter of OpenTelemetry, whatever its signal."""

    def export(self, batch: Any, /) -> Any:
        """Send a batch; return SUCCESS or FAILURE."""

    def shutdown(self) -> None:
        """Send nothing more."""


class ExportWatch:
    """Counts what one kind of telemetry loses, and says so. Used from several threads."""

    def __init__(self, signal: str, endpoint: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``signal`` is what is exported, such as "traces"."""
        self.num_lost = 0
        self._signal = signal
        self._endpoint = without_credentials(endpoint)
        self._clock = clock
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._said_at = float("-inf")
        self._is_said = False
        self._num_waiting = 0
        self._lost_before = 0

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt has failed."""
        return self._failing_since is not None

    def say_where(self, protocol: str) -> None:
        """Log where the telemetry goes."""
        logger.info("exporting %s endpoint=%s protocol=%s", self._signal, self._endpoint, protocol)

    def queued(self, *, room: int) -> None:
        """Count what waits to be exported; beyond ``room``, the oldest is dropped."""
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting > room:
                self._num_waiting = room
                self.num_lost += 1

    def begun(self, num: int) -> None:
        """Note that ``num`` wait no longer."""
        with self._lock:
            self._num_waiting = max(0, self._num_waiting - num)

    def succeeded(self) -> None:
        """Note that a batch was taken."""
        with self._lock:
            since, self._failing_since = self._failing_since, None
            was_said, self._is_said = self._is_said, False
            lost = self.num_lost - self._lost_before
        if since is not None and was_said:
            seconds = self._clock() - since
            logger.info(
                "exporting %s again endpoint=%s lost=%d seconds=%.0f", self._signal, self._endpoint, lost, seconds
            )

    def failed(self, num: int, reason: str) -> None:
        """Count a batch of ``num`` that was not taken; one that comes and goes is named once in a while, too."""
        with self._lock:
            now = self._clock()
            if self._failing_since is None:
                self._failing_since, self._lost_before = now, self.num_lost
            self.num_lost += num
            lost = self.num_lost - self._lost_before
            if now < self._said_at + REMIND_SECONDS:
                return
            self._said_at, self._is_said = now, True
        logger.warning(
            "cannot export %s endpoint=%s lost=%d: %s; training goes on", self._signal, self._endpoint, lost, reason
        )


class WatchedExporter:
    """An exporter that says what becomes of its batches through ``watch``."""

    def __init__(self, exporter: Exporter, watch: ExportWatch) -> None:
        self.inner = exporter
        self._watch = watch

    @property
    def is_failing(self) -> bool:
        """Whether the last batch was not taken."""
        return self._watch.is_failing

    def export(self, batch: Any) -> Any:
        """Send a batch of spans or of lines, or the metrics of a moment; return what the exporter does, if anything."""
        num = len(batch) if isinstance(batch, Sequence) else 1
        self._watch.begun(num)
        with _libraries.caught() as said:
            try:
                result = self.inner.export(batch)
            except Exception as error:
                self._watch.failed(num, without_credentials(f"{type(error).__name__}: {error}")[:_MAX_REASON])
                return None
        if result.name == "SUCCESS":
            self._watch.succeeded()
        else:
            self._watch.failed(num, reason_of(said))
        return result

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: nothing waits here."""
        return True

    def shutdown(self) -> None:
        """Send nothing more; an attempt that is under way ends as soon as it can."""
        self.inner.shutdown()


def reason_of(said: Sequence[str]) -> str:
    """Return in words why an export has failed, by what the libraries said of it."""
    text = " ".join(said)
    for pattern, words in _WORDS:
        if found := re.search(pattern, text):
            return words.format(**found.groupdict())
    return without_credentials(said[-1].splitlines()[0] if said else "no reason was given")[:_MAX_REASON]


def without_credentials(text: str) -> str:
    """Return a text with an endpoint as logs may show it: without its user, password and query."""
    text = re.sub(r"//.*@", "//***@", text) if "//" in text else re.sub(r"^.*@", "***@", text)
    return re.sub(r"\?\S*", "?***", text)


class _LibraryLogs(logging.Handler):
    """Takes what the libraries log, from each thread apart; what they log outside of an export is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()

    def caught(self) -> "_Caught":
        """Return what catches the messages of this thread."""
        return _Caught(self._own)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        said: list[str] | None = getattr(self._own, "said", None)
        if said is not None:
            said.append(record.getMessage())


class _Caught:
    def __init__(self, own: threading.local) -> None:
        self._own = own

    def __enter__(self) -> list[str]:
        said: list[str] = []
        self._own.said = said
        return said

    def __exit__(self, *_: object) -> None:
        self._own.said = None


_libraries = _LibraryLogs()


def catch_library_logs() -> None:
    """Keep the lines of the exporters out of the log, all of them: the libraries drop repeated ones."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LIBRARIES)]:
        logging.getLogger(name).filters.clear()
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.propagate = False
        if _libraries not in library.handlers:
            library.addHandler(_libraries)
