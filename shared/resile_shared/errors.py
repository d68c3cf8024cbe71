"""The one family of errors Resile raises on purpose.

A message says what is wrong, where, and what to do next; commands print it as one line and exit with ``exit_status``.
"""


class ResileError(Exception):
    """Base of every error that Resile raises on purpose; its text is fit for a user."""

    exit_status = 1


class MessageTooLarge(ResileError):
    """A message is larger than the bus takes. Nothing was sent."""

    def __init__(self, subject: str, num_bytes: int) -> None:
        super().__init__(f"a message of {num_bytes} bytes on {subject} exceeds the maximum message size")
        self.num_bytes = num_bytes


class UsageError(ResileError):
    """What was asked for cannot be done as asked: a bad option, plan, path or argument."""

    exit_status = 2
