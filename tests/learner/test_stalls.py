"""A worker whose main thread does not come on is noticed, and one that is only slow is not."""

import math

from resile_learner.phases import CurrentPhase, Phase, Phases
from resile_learner.worker.failure_detection import FIRST_SECONDS, Stall, StallDetector

DETECTION = 3.0
INTERVAL = DETECTION / 20


class Scene:
    """A watch that looks at phases on time, as long as its process runs."""

    def __init__(self) -> None:
        self.phases = Phases()
        self.detector = StallDetector(detection_seconds=DETECTION, interval=INTERVAL)
        self.now = 1000.0
        self.enter("waiting")

    def enter(self, phase: Phase) -> None:
        self.phases.current = CurrentPhase(phase, self.now)

    def knows(self, phase: Phase, *, longest: float) -> None:
        self.phases.longest[phase] = longest

    def look_for(self, seconds: float, *, every: float = INTERVAL) -> Stall | None:
        for _ in range(math.ceil(seconds / every)):
            self.now += every
            if stall := self.detector.check(self.phases, now=self.now):
                return stall
        return None

    def stand_still(self, seconds: float) -> None:
        self.now += seconds


def test_a_phase_that_takes_far_longer_than_ever_is_stall_and_says_so() -> None:
    scene = Scene()
    scene.knows("compute", longest=0.1)
    scene.enter("compute")
    assert scene.look_for(59) is None
    stall = scene.look_for(2)
    assert stall is not None
    assert str(stall) == "stuck in compute for 60 s; it took at most 0.1 s before"


def test_what_takes_long_has_ten_times_as_long() -> None:
    scene = Scene()
    scene.knows("data", longest=30)
    scene.enter("data")
    assert scene.look_for(299) is None
    assert scene.look_for(2) is not None


def test_the_first_of_a_kind_may_take_ten_minutes() -> None:
    scene = Scene()
    scene.knows("compute", longest=0.1)
    scene.enter("validation")
    assert scene.look_for(FIRST_SECONDS - 1) is None
    stall = scene.look_for(2)
    assert stall is not None
    assert "it was its first" in str(stall)


def test_a_callback_may_do_something_rare() -> None:
    scene = Scene()
    scene.knows("callback", longest=0.001)
    scene.enter("callback")
    assert scene.look_for(FIRST_SECONDS - 1) is None
    assert scene.look_for(2) is not None


def test_nobody_is_stuck_who_waits_for_others() -> None:
    scene = Scene()
    scene.knows("waiting", longest=0.1)
    assert scene.look_for(10_000) is None


def test_each_phase_has_its_own_time() -> None:
    scene = Scene()
    for phase in ("data", "compute"):
        scene.knows(phase, longest=0.1)
    for _ in range(10):
        for phase in ("data", "compute"):
            scene.enter(phase)
            assert scene.look_for(40) is None


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    scene = Scene()
    scene.knows("compute", longest=0.1)
    scene.enter("compute")
    assert scene.look_for(30) is None
    scene.stand_still(1000)
    assert scene.look_for(29) is None
    assert scene.look_for(2) is not None


def test_who_looks_late_all_the_time_sees_it_all_the_same() -> None:
    scene = Scene()
    scene.knows("compute", longest=0.1)
    scene.enter("compute")
    assert scene.look_for(61, every=10 * INTERVAL) is not None


def test_phases_know_how_long_they_took() -> None:
    phases = Phases()
    for phase in ("data", "compute", "data", "waiting"):
        phases.enter(phase)
    assert phases.current.phase == "waiting"
    assert set(phases.longest) == {"waiting", "data", "compute"}
    data, callback = phases.take_seconds(("data", "callback"))
    assert data >= phases.longest["data"] > 0
    assert callback == 0
    assert phases.take_seconds(("data",)) == [0.0]
