"""A suspicion is reported once, repeated while its generation is current, and not after training is complete."""

from resile_learner.worker.failure_detection import REPEATS_PER_DETECTION, Suspicions

DETECTION = 3.0
INTERVAL = DETECTION / REPEATS_PER_DETECTION


def suspicions() -> Suspicions:
    return Suspicions(0, detection_seconds=DETECTION)


def test_a_suspicion_is_reported_once_and_repeated_before_it_expires() -> None:
    known = suspicions()
    first = known.add(2, "silence", "nothing was heard", generation=1, now=10.0)
    assert first is not None
    assert (first.suspect, first.generation, first.evidence) == (2, 1, "silence")
    assert known.add(2, "hearsay", "another one says so", generation=1, now=10.1) is None
    assert known.due(generation=1, now=10.0 + 0.9 * INTERVAL) == []
    assert known.due(generation=1, now=10.0 + INTERVAL) == [first]
    assert known.due(generation=1, now=10.0 + INTERVAL) == []
    assert known.due(generation=1, now=10.0 + 2 * INTERVAL) == [first]


def test_a_newer_generation_ends_a_suspicion_and_may_begin_another() -> None:
    known = suspicions()
    known.add(2, "silence", "", generation=1, now=0.0)
    assert known.due(generation=2, now=5.0) == []
    assert known.add(2, "silence", "", generation=2, now=6.0) is not None


def test_a_late_suspicion_of_an_older_generation_does_not_replace_a_newer_one() -> None:
    known = suspicions()
    newer = known.add(2, "silence", "", generation=2, now=0.0)
    assert known.add(2, "broken link", "", generation=1, now=0.1) is None
    assert known.due(generation=2, now=5.0) == [newer]


def test_who_is_no_member_suspects_nobody() -> None:
    assert suspicions().add(2, "silence", "", generation=None, now=0.0) is None


def test_nobody_is_suspected_once_training_is_complete() -> None:
    known = suspicions()
    known.add(2, "silence", "", generation=1, now=0.0)
    known.complete()
    assert known.due(generation=1, now=5.0) == []
    assert known.add(1, "silence", "", generation=1, now=6.0) is None
