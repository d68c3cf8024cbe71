"""Whether the two runs of the demo ended alike, and did what they were to do."""

from collections.abc import Iterator

from resile_learner.messages import EpochCount

from .story import Run


def faults(elastic: Run, undisturbed: Run) -> list[str]:
    """Say all that is not as it has to be; nothing, if the demo has shown what it promises."""
    return [*_faults_of(elastic), *_faults_of(undisturbed), *_differences(elastic, undisturbed)]


def used_once(epoch: EpochCount) -> bool:
    """Whether every sample of the epoch was used, and none twice."""
    return (epoch.once, epoch.more, epoch.never) == (epoch.samples, 0, 0)


def _faults_of(run: Run) -> Iterator[str]:
    if run.visited != run.plan:
        planned, visited = (",".join(map(str, steps)) for steps in (run.plan, run.visited))
        yield f"the {run.name} run was to follow the plan {planned}, and did {visited}"
    if run.completed.bits != "same bits":
        yield f"the {run.name} run says of its bits: {run.completed.bits}"
    if not run.completed.ledger:
        yield f"the {run.name} run has no ledger"
    for epoch in run.completed.ledger:
        if not used_once(epoch):
            yield (
                f"epoch {epoch.epoch} of the {run.name} run: of {epoch.samples} samples {epoch.once} were used once, "
                f"{epoch.more} more often, {epoch.never} never"
            )


def _differences(elastic: Run, undisturbed: Run) -> Iterator[str]:
    one, other = elastic.recording.losses, undisturbed.recording.losses
    unequal = [number for number in sorted(one.keys() & other.keys()) if one[number] != other[number]]
    if unequal:
        yield f"the losses differ, first at iteration {unequal[0]}"
    if elastic.completed.params_sha256 != undisturbed.completed.params_sha256:
        yield "the parameters differ"
