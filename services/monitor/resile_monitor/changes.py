"""The changes of a job: the items of its history that one cause led to, how long that took, and what it was in words.

The history is permanent, as is the trace id of each item. Where the spans of the trace are kept as well, they show how
long a change took, and when it began: items are written when a change has taken effect.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resile_shared.http.api import ChangeKind, ChangeView
from resile_shared.messages.allocations import Loss
from resile_shared.messages.jobs import HistoryItem
from resile_shared.messages.message import at, timestamp
from resile_shared.messages.spans import Span

from .kept_traces import Traces

_ENDS = ("completed", "failed", "stopped")
_PAUSES = ("pausing", "paused")
_SUSPICIONS = ("recover", "worker suspected")
ATTACK = "attack"
"""The name of a step that `resile chaos` reports."""
MAX_CHANGES = 1000


@dataclass(frozen=True)
class TracedItem:
    """An item of a history, and the trace in which it was published; empty: not known."""

    item: HistoryItem
    trace: str = ""


def changes_of(job: str, name: str, history: Sequence[TracedItem], traces: Traces) -> tuple[ChangeView, ...]:
    """Return the changes of ``job``, oldest first: those of its history, and the checkpoints that are remembered."""
    grouped: dict[object, list[HistoryItem]] = {}
    for traced in history:
        grouped.setdefault(traced.trace or traced.item.number, []).append(traced.item)
    items_of = [traced.item for traced in history]
    numbers = [item.number for item in items_of]
    found = []
    for trace, items in grouped.items():
        kept = traces.get(trace) if isinstance(trace, str) else None
        change = _Change(
            name,
            items,
            trained=_trained(items_of[: bisect_left(numbers, items[0].number)]),
            later=items_of[bisect_right(numbers, items[-1].number) :],
            spans=kept.of_job(job) if kept else [],
        )
        found.append(change.view(trace if isinstance(trace, str) else None))
    found += [_checkpoint(name, trace, span) for trace, span in traces.checkpoints(job)]
    return tuple(sorted(found, key=lambda change: change.time)[-MAX_CHANGES:])


def _trained(before: Sequence[HistoryItem]) -> HistoryItem | None:
    """Return the allocation with which the job trained; None if it did not."""
    for item in reversed(before):
        if item.kind == "allocation":
            return item
        if item.kind in ("queued", "paused"):
            return None
    return None


def _checkpoint(name: str, trace: str, span: Span) -> ChangeView:
    seconds = (span.end - span.begin) / 1e6
    iteration = int(span.attributes.get("resile.iteration", 0))
    return ChangeView(
        number=None,
        items=(),
        kind="checkpoint",
        time=at(span.begin / 1e6),
        seconds=seconds,
        generation=0,
        iteration=iteration,
        workers_before=0,
        workers=0,
        reason="",
        summary=f"A checkpoint of {name} at iteration {iteration}, begun at {_time(span.begin)}, was stored after "
        f"{_seconds(seconds)}.",
        trace=trace,
        has_spans=True,
    )


@dataclass(frozen=True)
class _Change:
    name: str
    items: Sequence[HistoryItem]
    trained: HistoryItem | None
    """The allocation with which the job trained before the change; None if it did not."""
    later: Sequence[HistoryItem]
    """The items of the history after those of the change."""
    spans: Sequence[Span]
    """The spans of the job in the trace of the change, by their begin; empty if they are not kept."""

    def view(self, trace: str | None) -> ChangeView:
        item = self.items[-1]
        shown = next((item for item in reversed(self.items) if item.kind == "allocation"), item)
        return ChangeView(
            number=self.items[0].number,
            items=tuple(item.number for item in self.items),
            kind=self.kind,
            time=self.items[0].time,
            seconds=self.seconds,
            generation=shown.generation,
            iteration=shown.iteration,
            workers_before=len(self.slots_before),
            workers=item.workers,
            reason=next((item.reason for item in (shown, *self.items) if item.reason), ""),
            summary=f"{self._summary()}.",
            trace=trace,
            has_spans=bool(self.spans),
        )

    @property
    def kind(self) -> ChangeKind:
        kinds = {item.kind for item in self.items}
        if kinds & set(_ENDS):
            return "end"
        if kinds & set(_PAUSES):
            return "pause"
        if self._suspicion is not None or self._loss is not None:
            return "recovery"
        if "accepted" in kinds or ("allocation" in kinds and not self.slots_before):
            return "start"
        return "resize" if "allocation" in kinds else "other"

    @property
    def slots_before(self) -> tuple[str, ...]:
        return self.trained.slots if self.trained else ()

    @property
    def begin(self) -> int:
        """When its cause occurred, in microseconds since the epoch: a loss precedes what it leads to."""
        if self._suspicion is not None:
            return self._suspicion.begin
        return round(self.items[0].time.timestamp() * 1e6)

    @property
    def _cost_begin(self) -> int:
        """When training stopped progressing: a loss costs the iteration in flight, however late the loss is noticed."""
        if self.kind != "recovery":
            return self.begin
        return min((span.begin for span in self.spans if span.attributes.get("resile.abandoned")), default=self.begin)

    @property
    def seconds(self) -> float | None:
        """How long it took until training continued, or until the change took effect."""
        if self.kind in ("end", "pause", "other"):
            end = round(self.items[-1].time.timestamp() * 1e6)
        else:
            end = self._first_iteration.begin if self._first_iteration else 0
        begin = self._cost_begin
        return (end - begin) / 1e6 if end >= begin and (self.spans or end > begin) else None

    @property
    def _lost_host(self) -> str:
        """The lost host on which the job had workers; empty: none."""
        host = self._loss.host if self._loss else None
        return host if host and any(slot.startswith(f"{host}/") for slot in self.slots_before) else ""

    @property
    def _loss(self) -> Loss | None:
        return self._loss_item.loss if self.slots_before else None

    @property
    def _loss_item(self) -> HistoryItem:
        """The first item that a loss led to; replacements, which come later, may belong to the same trace."""
        return next((item for item in self.items if item.kind in ("allocation", "queued")), self.items[0])

    @property
    def _suspicion(self) -> Span | None:
        return next((span for span in self.spans if span.name in _SUSPICIONS), None)

    @property
    def _first_iteration(self) -> Span | None:
        """The first iteration after the change; those before it belong to the trace as well."""
        allocations = [item for item in self.items if item.kind == "allocation"]
        shown = allocations[: 1 if self.kind == "recovery" else None][-1:]
        number = next((item.iteration for item in shown), None)
        iterations = (
            span
            for span in self.spans
            if span.name == "iteration" and not span.attributes.get("resile.abandoned") and span.begin >= self.begin
        )
        return next((span for span in iterations if span.attributes.get("resile.iteration") == number), None)

    def _summary(self) -> str:
        match self.kind:
            case "start":
                return self._start()
            case "resize":
                return self._resize()
            case "recovery":
                return self._recovery()
            case "pause":
                return self._pause()
            case _:
                item = self.items[-1]
                what = "changed its priority" if item.kind == "priority" else f"{_WORDS.get(item.kind, item.kind)}"
                return f"{self.name} {what} at {timestamp(item.time)}{_because(item.reason)}"

    def _start(self) -> str:
        first, last = self.items[0], self.items[-1]
        what = {"accepted": "was submitted", "queued": "was queued"}.get(first.kind, "started")
        text = f"{self.name} {what} at {timestamp(first.time)}"
        if last.kind != "allocation":
            return f"{text} and is waiting{_because(last.reason)}"
        after = f", {_seconds(self.seconds)} later" if self.seconds is not None and first is not last else ""
        return f"{text}; {_workers(last.workers)} began to train at iteration {last.iteration}{after}"

    def _resize(self) -> str:
        last = next(item for item in reversed(self.items) if item.kind == "allocation")
        num = len(self.slots_before)
        size = (
            f"from {num} to {_workers(last.workers)}" if num != last.workers else f"to other slots for {_workers(num)}"
        )
        text = f"{self.name} went {size} at {timestamp(last.time)}{_because(last.reason)}"
        pauses = [span.end - span.begin for span in self.spans if span.name == "switch generation"]
        return f"{text}; the switch took {_seconds(max(pauses) / 1e6)}" if pauses else text

    def _recovery(self) -> str:
        when, num_before = _time(self.begin), len(self.slots_before)
        restart = self._loss.restart if self._loss else ""
        if host := self._lost_host:
            num_lost = sum(slot.startswith(f"{host}/") for slot in self.slots_before)
            text = f"{host} was lost at {when}{self._cause()}; {num_lost} of {_workers(num_before)} of "
            text += f"{self.name} were there"
        else:
            what = f"all its {_workers(num_before)}" if restart else "a worker"
            reason = self._loss.reason if self._loss else self._loss_item.reason
            text = f"{self.name} lost {what} at {when}{self._cause()}{_because(reason)}"
        if restart:
            text += f"; it started again {restart}"
        if self.seconds is not None:
            late = (self.begin - self._cost_begin) / 1e6
            text += f"; training went on after {_seconds(self.seconds - late)}"
            text += f" and lost {_seconds(self.seconds)} in all" if late else ""
        first = self._loss_item
        size = next((item.workers for item in self.items if item.kind == "allocation"), first.workers)
        joined = next(
            (item for item in (*self.items, *self.later) if item.kind == "allocation" and item.workers > size), None
        )
        return f"{text}; replacements joined at {timestamp(joined.time)}" if joined else text

    def _cause(self) -> str:
        """Name the attack that caused a loss, and the time into the iteration that it cost, where these are known.

        A silent worker or host is noticed late.
        """
        into = (self.begin - self._cost_begin) / 1e6
        found = (str(span.attributes.get("resile.attack", "")) for span in self.spans if span.name == ATTACK)
        attacks = " and ".join(f'"{attack}"' for attack in dict.fromkeys(found))
        text = f" by the attack {attacks}" if attacks else ""
        return f"{text}, {_seconds(into)} into iteration {self._loss_item.iteration}" if into > 0 else text

    def _pause(self) -> str:
        first, last = self.items[0], self.items[-1]
        text = f"{self.name} was asked to pause at {timestamp(first.time)}"
        if last.kind != "paused":
            return text
        stored = next((span for span in self.spans if span.name == "checkpoint"), None)
        text += (
            f"; it was paused at iteration {last.iteration}, {_seconds((last.time - first.time).total_seconds())} later"
        )
        return f"{text}, of which its checkpoint took {_seconds((stored.end - stored.begin) / 1e6)}" if stored else text


_WORDS: Mapping[str, str] = {"queued": "was queued", "accepted": "was submitted", "stopped": "was stopped"}


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _workers(num: int) -> str:
    return f"{num} worker{'' if num == 1 else 's'}"


def _time(microseconds: int) -> str:
    return timestamp(at(microseconds / 1e6))


def _seconds(seconds: float | None) -> str:
    seconds = seconds or 0.0
    return f"{seconds:.2f} s" if seconds >= 0.0995 else f"{1000 * seconds:.0f} ms"
