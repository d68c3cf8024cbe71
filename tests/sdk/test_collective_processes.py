"""The exchange alone, by real processes that are killed, frozen and interrupted."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from resile.collectives import serve

from .collective_members import PACED, Process, processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "collectives.py"
STEPS = 300
PACE_SECONDS = 0.1
Start = Callable[..., Process]


@pytest.fixture(name="start")
def _start() -> Iterator[Start]:
    with processes() as start:
        yield start


def paced(start: Start, address: str, *words: str) -> Process:
    """A member that has imported all it needs; it joins, and goes on after each step, when it is told to."""
    return start("-c", PACED, EXAMPLE, address, "--seconds=42", *words)


def free(start: Start, address: str, *words: str) -> Process:
    return start(EXAMPLE, address, *words)


def weights(process: Process) -> str:
    status, err = process.end()
    assert status == 0, err
    return process.lines[-1]


@pytest.fixture(name="alone", scope="module")
def _alone() -> str:
    """What one member alone ends with."""
    with serve() as rendezvous, processes() as start:
        return weights(free(start, rendezvous.address, f"--steps={STEPS}"))


@contextmanager
def going_on(process: Process) -> Iterator[None]:
    """Let a paced process, and all that wait for it, go on slowly."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(PACE_SECONDS):
            with suppress(BrokenPipeError):
                process.go()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_members_join_are_killed_and_leave_and_all_end_with_the_bits_of_one_member_alone(
    start: Start, alone: str
) -> None:
    address = start("-m", "resile.collectives", "--listen=127.0.0.1:0").wait_for("rendezvous at").split()[-1]
    killed = paced(start, address, "--size=3", f"--steps={STEPS}")
    other = free(start, address, "--size=3", f"--steps={STEPS}")
    leaver = free(start, address, "--size=3", "--steps=5")
    joiner = paced(start, address, f"--steps={STEPS}")
    joiner.wait_for("imported")
    killed.go()
    other.wait_for("step 1 of 3")
    joiner.go()
    with going_on(killed):
        joiner.go(STEPS)
        joiner.wait_for("members")
        assert leaver.end()[0] == 0
    killed.send(signal.SIGKILL)
    assert [weights(other), weights(joiner)] == [alone] * 2
    assert leaver.lines[-2].startswith("step 5 of")
    assert not any(line.startswith("weights") for line in killed.lines)
    assert other.lines[-2] == f"step {STEPS} of 2 members"


def test_a_frozen_member_is_removed_and_says_so_when_it_goes_on(start: Start, alone: str) -> None:
    with serve(detection_seconds=1.0) as rendezvous:
        frozen = paced(start, rendezvous.address, "--size=3", f"--steps={STEPS}")
        others = [free(start, rendezvous.address, "--size=3", f"--steps={STEPS}") for _ in range(2)]
        frozen.go(5)
        frozen.wait_for("step 5 of 3")
        frozen.send(signal.SIGSTOP)
        ended = [weights(process) for process in others]
        frozen.send(signal.SIGCONT)
        status, err = frozen.end()
    assert ended == [alone] * 2
    assert status == 1
    assert "this member was removed from the group" in err


def test_an_interrupted_member_ends_at_once_and_the_others_continue(start: Start, alone: str) -> None:
    with serve(detection_seconds=60.0) as rendezvous:
        interrupted = free(start, rendezvous.address, "--size=2", f"--steps={STEPS}")
        other = paced(start, rendezvous.address, "--size=2", f"--steps={STEPS}")
        other.go(5)
        interrupted.wait_for("step 5 of 2")  # then it waits for the other
        interrupted.send(signal.SIGINT)
        status, err = interrupted.end()
        other.go(STEPS)
        ended = weights(other)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1, err
    assert status == -signal.SIGINT
    assert ended == alone


def test_an_interrupted_join_ends_at_once(start: Start) -> None:
    with serve() as rendezvous:
        waiting = start(
            "-c",
            "import sys; from resile.collectives import join; print('here', flush=True); join(sys.argv[1], size=2)",
            rendezvous.address,
        )
        waiting.wait_for("here")
        waiting.send(signal.SIGINT)
        assert waiting.end()[1].rstrip().endswith("KeyboardInterrupt")


def test_members_are_found_again_by_a_rendezvous_that_was_killed_and_restarted(start: Start, alone: str) -> None:
    """Then a process can join again, a member can be lost and one can leave, and the bits are those of one alone."""
    rendezvous = start("-m", "resile.collectives", "--listen=127.0.0.1:0")
    address = rendezvous.wait_for("rendezvous at").split()[-1]
    words = (address, "--size=2", f"--steps={STEPS}")
    one, other = (paced(start, *words) for _ in range(2))
    for process in (one, other):
        process.wait_for("imported")
        process.go(20)
    one.wait_for("step 10 of 2")
    rendezvous.kill()
    late = paced(start, address, f"--steps={STEPS}")
    late.wait_for("imported")
    start("-m", "resile.collectives", f"--listen={address}").wait_for("rendezvous at")
    with going_on(one), going_on(other), going_on(late):
        one.wait_for("of 3")
    other.send(signal.SIGKILL)
    one.go(STEPS)
    late.go(STEPS)
    assert weights(one) == weights(late) == alone


def test_members_go_on_without_the_rendezvous_until_one_of_them_is_lost(start: Start) -> None:
    rendezvous = start("-m", "resile.collectives", "--listen=127.0.0.1:0")
    address = rendezvous.wait_for("rendezvous at").split()[-1]
    words = (address, "--size=2", "--steps=1000000", "--seconds=0.01")
    one, other = free(start, *words), free(start, *words)
    one.wait_for("step 5 of 2")
    rendezvous.kill()
    one.wait_for("step 50 of 2")
    other.send(signal.SIGKILL)
    status, err = one.end()
    assert status == 1
    assert f"the rendezvous at {address} is gone" in err
