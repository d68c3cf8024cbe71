"""What the members of a job say of themselves shows which promise broke, whatever the records of the scheduler say."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from resile.chaos.members import SETTLE_SECONDS, MemberCommit, Saved, faults_of_members, read_commits
from resile_shared.messages.jobs import HistoryItem

from .test_verdict import SHA, completed, item

Workers = Sequence[int]


def trained(
    generation: int, iterations: range, *, workers: Workers, start: float, params: str = ""
) -> list[MemberCommit]:
    """Commits of all ``workers``, an iteration in each second."""
    return [
        MemberCommit(
            time=start + second + worker / 1000,
            job="job-1",
            worker=worker,
            generation=generation,
            iteration=iteration,
            params=params or f"params-{iteration}",
        )
        for second, iteration in enumerate(iterations)
        for worker in workers
    ]


def history(*begun: int, last: int) -> tuple[HistoryItem, ...]:
    """A history whose generations began at the iterations ``begun``."""
    allocations = [item(number, generation=number, iteration=start) for number, start in enumerate(begun, start=1)]
    return (*allocations, at(900.0, item(len(begun) + 1, "completed", iteration=last)))


def restarted(*begun: int, last: int) -> tuple[HistoryItem, ...]:
    """The same, of a job that lost all its workers before each generation but the first."""
    kept = history(*begun, last=last)
    items = [kept[0]]
    for entry in kept[1:-1]:
        items += [at(110.0, item(entry.number, "queued", iteration=entry.iteration)), entry]
    return (*items, kept[-1])


def at(time: float, entry: HistoryItem) -> HistoryItem:
    return entry.model_copy(update={"time": datetime.fromtimestamp(time, UTC)})


def faults(
    commits: Sequence[MemberCommit],
    *begun: int,
    checkpoints: Sequence[Saved] = (),
    damaged: Sequence[int] = (),
    attacks: Sequence[tuple[float, float]] = (),
    items: tuple[HistoryItem, ...] | None = None,
) -> list[str]:
    last = max(commit.iteration for commit in commits)
    job = completed(history=items or history(*begun, last=last), iteration=last, params_sha256=SHA)
    ordered = sorted(commits, key=lambda commit: commit.time)
    return list(faults_of_members(job, ordered, checkpoints=checkpoints, damaged=damaged, attacks=attacks))


FIRST = trained(1, range(1, 11), workers=(0, 1), start=100.0)


def test_a_job_that_shrinks_and_grows_has_no_fault() -> None:
    commits = [
        *FIRST,
        *trained(2, range(11, 21), workers=(0,), start=111.0),
        *trained(3, range(21, 31), workers=(0, 2), start=122.0),
    ]
    assert faults(commits, 0, 10, 20) == []


def test_a_lost_member_alone_may_have_committed_the_iteration_in_flight() -> None:
    alone = [commit for commit in FIRST if not (commit.worker == 0 and commit.iteration == 10)]
    assert faults([*alone, *trained(2, range(10, 21), workers=(0,), start=111.0)], 0, 9) == []


def test_a_start_from_the_newest_checkpoint_that_is_not_damaged_has_no_fault() -> None:
    checkpoints = [Saved(105.0, 4), Saved(109.0, 8)]
    again = trained(2, range(5, 21), workers=(2, 3), start=120.0)
    items = restarted(0, 4, last=20)
    assert faults([*FIRST, *again], checkpoints=checkpoints, damaged=[8], items=items) == []
    (fault,) = faults([*FIRST, *again], checkpoints=checkpoints, items=items)
    assert fault == "job-1: generation 2 began at iteration 4, beside a complete checkpoint of iteration 8"


AGAIN = trained(2, range(5, 8), workers=(2, 3), start=120.0)


def test_what_was_lost_beyond_a_checkpoint_does_not_count_when_the_workers_change_after_a_start_from_it() -> None:
    more = trained(3, range(8, 21), workers=(2, 3, 4), start=130.0)
    items = (*restarted(0, 4, last=20)[:-1], *history(0, 4, 7, last=20)[2:])
    assert faults([*FIRST, *AGAIN, *more], checkpoints=[Saved(105.0, 4)], items=items) == []


def test_a_jump_within_a_lineage_is_named_though_another_one_was_as_far() -> None:
    more = trained(3, range(10, 21), workers=(2, 3, 4), start=130.0)
    items = (*restarted(0, 4, last=20)[:-1], *history(0, 4, 9, last=20)[2:])
    (fault,) = faults([*FIRST, *AGAIN, *more], checkpoints=[Saved(105.0, 4)], items=items)
    assert fault == "job-1: generation 3 began at iteration 9, but only 7 were committed before"


def test_a_job_that_moves_as_a_whole_goes_on_where_it_was() -> None:
    moved = trained(2, range(11, 21), workers=(2, 3), start=111.0)
    assert faults([*FIRST, *moved], 0, 10, checkpoints=[Saved(105.0, 4)]) == []
    (fault,) = faults([*FIRST, *trained(2, range(5, 21), workers=(2, 3), start=111.0)], 0, 4)
    assert fault == (
        "job-1: generation 2 began at iteration 4 though it took over from others, and 10 were committed before"
    )


def test_a_checkpoint_that_was_reported_after_the_job_was_given_up_is_none() -> None:
    items = (
        item(1, generation=1, iteration=0),
        at(110.0, item(2, "queued", iteration=4)),
        item(3, generation=2, iteration=4),
        at(900.0, item(4, "completed", iteration=20)),
    )
    again = trained(2, range(5, 21), workers=(2, 3), start=120.0)
    assert faults([*FIRST, *again], checkpoints=[Saved(105.0, 4), Saved(115.0, 8)], items=items) == []


@pytest.mark.parametrize(
    ("commits", "begun", "fault"),
    [
        (trained(2, range(12, 21), workers=(0, 1), start=111.0), 11, "but only 10 were committed before"),
        (trained(2, range(6, 21), workers=(0, 2), start=111.0), 5, "though a worker survived"),
        (trained(2, range(11, 21), workers=(0,), start=111.0), 12, "at iteration 12 by its history, at 10"),
    ],
)
def test_a_generation_that_does_not_continue_is_named(commits: list[MemberCommit], begun: int, fault: str) -> None:
    found = faults([*FIRST, *commits], 0, begun, checkpoints=[Saved(109.0, 8)])
    assert any(fault in told for told in found), found


def test_members_with_different_models_after_one_iteration_are_named() -> None:
    other = trained(1, range(10, 11), workers=(2,), start=109.0, params="another")
    (fault,) = faults([*FIRST, *other], 0)
    assert "after iteration 10 worker 2 of generation 1 has another model than worker" in fault


def test_a_worker_that_follows_an_older_generation_is_named() -> None:
    stale = trained(1, range(13, 14), workers=(0,), start=120.0)
    found = faults([*FIRST, *trained(2, range(11, 13), workers=(0,), start=111.0), *stale], 0, 10)
    assert "job-1: worker 0 went back from generation 2 to 1" in found


def test_a_worker_that_skips_an_iteration_within_a_generation_is_named() -> None:
    commits = [commit for commit in FIRST if not (commit.worker == 1 and commit.iteration == 5)]
    assert faults(commits, 0) == ["job-1: worker 1 committed iteration 6 after 4 in generation 1"]


def test_an_isolated_generation_may_go_on_for_a_while_and_no_other_may() -> None:
    newer = trained(2, range(5, 60), workers=(2, 3), start=106.0)
    old = trained(1, range(11, 50), workers=(0, 1), start=110.0)
    checkpoints = [Saved(104.0, 4)]
    items = restarted(0, 4, last=59)
    assert faults([*FIRST, *old, *newer], checkpoints=checkpoints, attacks=[(104.0, 140.0)], items=items) == []
    (fault,) = faults([*FIRST, *old, *newer], checkpoints=checkpoints, items=items)
    assert fault == f"job-1: generation 1 still trains {SETTLE_SECONDS + 1:.0f} s after generation 2 does"


def test_a_generation_that_trained_for_long_and_is_in_no_history_is_named() -> None:
    commits = [*FIRST, *trained(2, range(11, 60), workers=(0,), start=111.0)]
    assert faults(commits, 0) == ["job-1: generation 2 trained 48 s and is not in its history"]


def test_an_iteration_that_no_member_committed_is_named() -> None:
    commits = [*FIRST[:-2], *trained(2, range(11, 21), workers=(2,), start=111.0)]
    assert "job-1: no member committed iteration 10" in faults(commits, 0, 10)


def test_the_file_of_all_members_is_read_by_job() -> None:
    text = "".join(commit.model_dump_json() + "\n" for commit in reversed(FIRST))
    assert read_commits(text) == {"job-1": FIRST}
    with pytest.raises(ValueError, match="iteration"):
        read_commits('{"time": 1}\n')
