"""The states of a job, and what leads from one to the next: one table.

- A job is *accepted* once it is stored, and *queued* while it is waiting for slots.
- It is *starting* from the allocation of its cold start until that generation trains, and then *running*.
- It is *rescaling* while a generation is allocated that is not active yet; a newer one may supersede that.
- It is *recovering* after the loss of members until a generation without them is active.
- A job that loses all its slots for now goes back to the queue: from `running` after a checkpoint, from `starting` at
  once. It is *paused* in the same way, but leaves that state only when a user resumes it.
- *completed*, *failed* and *stopped* are final. A job can complete, fail or be stopped at any moment of its training;
  it completes while it is waiting or paused if the report of its result comes late.

A step that the table does not have is a bug of the scheduler, not of a sender: requests are checked before.
"""

from enum import StrEnum

from resile_shared.errors import ResileError
from resile_shared.messages.jobs import JobState


class Step(StrEnum):
    """What can happen to a job as a whole."""

    ENQUEUE = "enqueue"
    START = "start"
    SETTLE = "settle"  # the newest generation is active
    RESCALE = "rescale"
    RECOVER = "recover"
    REQUEUE = "requeue"
    PAUSE = "pause"
    RESUME = "resume"
    COMPLETE = "complete"
    FAIL = "fail"
    STOP = "stop"


_ENDS = {Step.COMPLETE: JobState.COMPLETED, Step.FAIL: JobState.FAILED, Step.STOP: JobState.STOPPED}
_INTERRUPTIONS = {Step.REQUEUE: JobState.QUEUED, Step.PAUSE: JobState.PAUSED, **_ENDS}

TRANSITIONS: dict[JobState, dict[Step, JobState]] = {
    JobState.ACCEPTED: {Step.ENQUEUE: JobState.QUEUED},
    JobState.QUEUED: {
        Step.START: JobState.STARTING,
        Step.PAUSE: JobState.PAUSED,
        **_ENDS,
    },
    JobState.STARTING: {Step.SETTLE: JobState.RUNNING, **_INTERRUPTIONS},
    JobState.RUNNING: {Step.RESCALE: JobState.RESCALING, Step.RECOVER: JobState.RECOVERING, **_INTERRUPTIONS},
    JobState.RESCALING: {
        Step.SETTLE: JobState.RUNNING,
        Step.RESCALE: JobState.RESCALING,
        Step.RECOVER: JobState.RECOVERING,
        **_INTERRUPTIONS,
    },
    JobState.RECOVERING: {
        Step.SETTLE: JobState.RUNNING,
        Step.RECOVER: JobState.RECOVERING,
        **_INTERRUPTIONS,
    },
    JobState.PAUSED: {Step.RESUME: JobState.QUEUED, **_ENDS},
    JobState.COMPLETED: {},
    JobState.FAILED: {},
    JobState.STOPPED: {},
}


class IllegalStep(ResileError):
    """The scheduler tried a step that the table does not have."""

    def __init__(self, state: JobState, step: Step) -> None:
        super().__init__(f"a job that is {state} cannot {step}: this is a fault in the scheduler, please report it")
        self.state = state
        self.step = step


def advance(state: JobState, step: Step) -> JobState:
    """Return the state that ``step`` leads to. Raises IllegalStep."""
    try:
        return TRANSITIONS[state][step]
    except KeyError:
        raise IllegalStep(state, step) from None
