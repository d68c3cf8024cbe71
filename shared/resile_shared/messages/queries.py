"""Questions that change nothing, and their replies. Subjects: ``resile.query.<entity>.<verb>``."""

from pydantic import Field

from .message import Id, Message, Text

MAX_JOBS = 100_000


class ExplainJobs(Message):
    """``jobs.explain``: why does each job have what it has, or what is it waiting for? Replied to by the leader."""


class JobExplanations(Message):
    """The reasons of the newest decision, by job; a job that shares no slots now has none."""

    reasons: dict[Id, Text] = Field(default_factory=dict, max_length=MAX_JOBS)
