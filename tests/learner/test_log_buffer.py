"""Lines of a worker that wait for the bus: in order, in batches, bounded, and what is dropped is counted."""

from resile_learner.agent.host_workers import BATCH_BYTES, BATCH_LINES, MAX_WAITING_BYTES, MAX_WAITING_LINES, LogBuffer
from resile_shared.messages.logs import LogLine
from resile_shared.messages.message import at


def waiting(count: int, *, size: int = 0) -> LogBuffer:
    lines = LogBuffer()
    for number in range(count):
        lines.add(LogLine(time=at(0.0), stream="stdout", text=f"{number}".ljust(size)))
    return lines


def numbers(batch: tuple[LogLine, ...]) -> list[int]:
    return [int(line.text) for line in batch]


def test_lines_are_taken_in_order_and_in_batches() -> None:
    lines = waiting(BATCH_LINES + 1)
    assert numbers(lines.take()[0]) == list(range(BATCH_LINES))
    assert numbers(lines.take()[0]) == [BATCH_LINES]
    assert not lines


def test_a_batch_of_long_lines_is_bounded_in_bytes() -> None:
    assert len(waiting(10, size=BATCH_BYTES // 8).take()[0]) == 7


def test_the_oldest_of_too_many_lines_are_dropped_and_counted_once() -> None:
    lines = waiting(MAX_WAITING_LINES + 5)
    batch, dropped = lines.take()
    assert (numbers(batch)[0], dropped) == (5, 5)
    assert lines.take()[1] == 0


def test_long_lines_are_bounded_in_bytes() -> None:
    lines = waiting(100, size=MAX_WAITING_BYTES // 40)
    batch, dropped = lines.take()
    assert dropped == numbers(batch)[0] == 61


def test_a_batch_that_could_not_be_sent_comes_again() -> None:
    lines = waiting(3)
    lines.put_back(*lines.take())
    lines.add(LogLine(time=at(0.0), stream="stdout", text="3"))
    assert numbers(lines.take()[0]) == [0, 1, 2, 3]


def test_the_limits_leave_room_for_what_a_message_may_be() -> None:
    assert 6 * BATCH_BYTES < 8 << 20
