"""What fails again and again is tried again every few minutes, for as long as it fails."""

from resile_scheduler.core.state.backoff import MAX_BACKOFF_SECONDS, HostBackoff, StartBackoff

TIMES = 5000
"""So many failures take more than two weeks."""


def test_a_host_that_has_failed_for_weeks_is_avoided_for_the_longest_time() -> None:
    backoff = HostBackoff()
    for number in range(TIMES):
        now = MAX_BACKOFF_SECONDS * number
        backoff.add("host-1", now=now)
    assert backoff.avoided(now=now + MAX_BACKOFF_SECONDS - 1) == {"host-1"}
    assert backoff.expire(now=now + MAX_BACKOFF_SECONDS) == ["host-1"]


def test_a_job_whose_starts_have_been_fruitless_for_weeks_starts_again_after_the_longest_time() -> None:
    backoff = StartBackoff()
    for number in range(TIMES):
        now = MAX_BACKOFF_SECONDS * number
        backoff.begin(0)
        backoff.end(0, now=now)
    assert backoff.is_waiting(now=now + MAX_BACKOFF_SECONDS - 1)
    assert backoff.expire(now=now + MAX_BACKOFF_SECONDS)


def test_each_pause_is_twice_as_long_as_the_one_before() -> None:
    backoff = HostBackoff()
    for seconds in (5, 10, 20, 40, 80, 160, 300, 300):
        backoff.add("host-1", now=0.0)
        assert backoff.avoided(now=seconds - 1)
        assert not backoff.avoided(now=seconds)
