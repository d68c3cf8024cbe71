"""What a worker records around a change, and that it records nothing while nothing changes."""

from collections.abc import Iterator
from itertools import count

from resile_learner.changes import NUM_AROUND, SAMPLE_SECONDS, ChangeRecorder
from resile_learner.messages import MAX_WORKER_SPANS, WorkerSpan


class Trained:
    """A worker that trains, on a clock that ticks at each look."""

    def __init__(self, tick: float = 1.0) -> None:
        ticks: Iterator[int] = count()
        self.recorder = ChangeRecorder(lambda: next(ticks) * tick)
        self.sent: list[tuple[WorkerSpan, ...]] = []
        self.samples: list[tuple[WorkerSpan, ...]] = []
        self.iteration = 0

    def train(self, num: int) -> None:
        for _ in range(num):
            self.recorder.on_begin(self.iteration)
            with self.recorder.step("exchange"):
                pass
            self.iteration += 1
            self.recorder.on_commit(self.iteration - 1, self.send)

    def send(self, spans: tuple[WorkerSpan, ...], is_sample: bool) -> None:
        (self.samples if is_sample else self.sent).append(spans)


def names(spans: tuple[WorkerSpan, ...]) -> list[tuple[str, int | None, object]]:
    return [(span.name, span.parent, span.attributes.get("iteration")) for span in spans]


def test_the_first_iterations_are_reported_and_then_nothing() -> None:
    worker = Trained()
    with worker.recorder.step("receive state"):
        pass
    worker.train(1)
    assert [names(spans) for spans in worker.sent] == [
        [("receive state", None, None), ("iteration", None, 0), ("exchange", 1, None)]
    ], "after the first one at once"
    worker.train(2)
    assert len(worker.sent) == 2
    worker.train(5)
    assert len(worker.sent) == 2
    assert not worker.recorder.is_recording


def test_a_change_has_the_iterations_before_it_and_after_it() -> None:
    worker = Trained()
    worker.train(20)
    worker.sent.clear()
    worker.recorder.begin()
    with worker.recorder.step("switch generation"), worker.recorder.step("send state", to=3):
        pass
    worker.train(10)
    spans = [span for message in worker.sent for span in message]
    iterations = [span.attributes["iteration"] for span in spans if span.name == "iteration"]
    assert iterations == [*range(20 - NUM_AROUND, 20), *range(20, 20 + NUM_AROUND)]
    sending = next(span for span in spans if span.name == "send state")
    assert sending.parent is not None
    assert worker.sent[0][sending.parent].name == "switch generation"
    assert all(span.begin <= span.end for span in spans)


def test_an_abandoned_iteration_is_part_of_the_recovery() -> None:
    worker = Trained()
    worker.train(20)
    worker.sent.clear()
    worker.recorder.on_begin(20)
    worker.recorder.begin()
    worker.train(1)
    (spans,) = worker.sent
    abandoned = [span.attributes["iteration"] for span in spans if span.attributes.get("abandoned")]
    assert abandoned == [20]


def test_a_step_that_fails_and_one_that_never_ends_are_reported() -> None:
    worker = Trained()
    try:
        with worker.recorder.step("recover"):
            raise ValueError
    except ValueError:
        pass
    with worker.recorder.step("leave"):
        worker.recorder.flush(lambda spans: worker.sent.append(spans))
    failed, left = worker.sent[0]
    assert failed.attributes == {"error.type": "ValueError"}
    assert (left.name, left.end >= left.begin) == ("leave", True)


def test_what_is_recorded_is_bounded() -> None:
    worker = Trained()
    for _ in range(3 * MAX_WORKER_SPANS):
        with worker.recorder.step("exchange"):
            pass
    worker.train(1)
    assert len(worker.sent[0]) == MAX_WORKER_SPANS


def test_while_nothing_changes_an_iteration_is_sampled_now_and_then() -> None:
    worker = Trained(tick=1.0)
    worker.train(100)
    assert len(worker.sent) == 2
    assert 2 <= len(worker.samples) <= 200 / SAMPLE_SECONDS
    assert all(len(spans) == 1 for spans in worker.samples)
