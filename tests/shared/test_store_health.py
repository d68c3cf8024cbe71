"""What a service knows of whether the bus stores what it sends."""

from resile_shared.bus.store_health import StoreHealth


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_service_that_has_sent_nothing_knows_of_no_fault() -> None:
    health = StoreHealth(clock=Clock())
    assert (health.fault, health.seconds_since_stored) == ("", None)


def test_a_write_that_is_refused_is_a_fault_until_one_is_stored() -> None:
    clock = Clock()
    health = StoreHealth(clock=clock)
    with health.writing():
        health.on_refused("insufficient storage")
        assert health.fault == "insufficient storage"
        health.on_stored()
    clock.now += 3.0
    assert (health.fault, health.seconds_since_stored) == ("", 3.0)


def test_a_write_that_is_not_answered_is_a_fault_until_it_ends() -> None:
    clock = Clock()
    health = StoreHealth(clock=clock)
    with health.writing():
        clock.now += 4.0
        with health.writing():
            clock.now += 4.0
            assert health.fault == "a write has not been answered for 8 s"
        assert health.fault
    assert not health.fault
