"""Silence: who is frozen or cut off, as one worker sees it, tried without a clock."""

import hypothesis.strategies as st
from hypothesis import given

from resile_learner.worker.failure_detection import PeerLiveness

DETECTION = 3.0


class Listener:
    """A worker that looks around in time, and hears its peers when it does."""

    def __init__(self, *peers: int) -> None:
        self.liveness = PeerLiveness(detection_seconds=DETECTION)
        self.now = 1000.0
        for peer in peers:
            self.liveness.record(peer, now=self.now)

    def listen(self, seconds: float, *speaking: int) -> list[int]:
        silent = []
        end = self.now + seconds
        while self.now < end:
            self.now += self.liveness.interval
            silent += self.liveness.take_silent(now=self.now)
            for peer in speaking:
                self.liveness.record(peer, now=self.now)
        return silent


def test_a_peer_is_silent_when_nothing_was_heard_of_it_for_the_time_of_detection_and_no_sooner() -> None:
    listener = Listener(1, 2)
    assert listener.listen(DETECTION - 2 * listener.liveness.interval, 2) == []
    assert listener.listen(3 * listener.liveness.interval, 2) == [1]


def test_silence_is_told_once_and_again_after_the_peer_was_heard() -> None:
    listener = Listener(1)
    assert listener.listen(3 * DETECTION) == [1]
    listener.liveness.record(1, now=listener.now)
    assert listener.listen(3 * DETECTION) == [1]


def test_nothing_is_expected_of_a_peer_that_is_forgotten() -> None:
    listener = Listener(1)
    listener.liveness.remove(1)
    assert listener.listen(3 * DETECTION) == []


@given(frozen=st.floats(0.5, 1000.0), before=st.floats(0.2, 1.0))
def test_who_stood_still_itself_holds_that_against_nobody(frozen: float, before: float) -> None:
    listener = Listener(1)
    listener.listen(before, 1)
    listener.now += frozen
    assert listener.listen(DETECTION / 2) == [], "what was said meanwhile is still to be read"
    assert listener.listen(DETECTION) == [1]
