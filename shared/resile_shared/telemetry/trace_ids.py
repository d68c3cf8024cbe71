"""Ids of traces that several services choose alike: each notices the same failure, and their spans form one trace.

The id is a hash of what all of them know. So they need not ask each other who noticed it first.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b

from opentelemetry.context import Context, create_key, get_value, set_value
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

KEPT_BELOW = 1 << 24
"""The lower half of the id of a failure's trace is below this: samplers, which compare that half, keep it."""
_HALF = (1 << 64) - 1
_KEY = create_key("resile-trace-id")
_chosen: ContextVar[int] = ContextVar("resile_trace_id", default=0)


class TraceIds(RandomIdGenerator):
    """Random ids, but for traces that begin in a context that `agreed` has made."""

    def generate_trace_id(self) -> int:
        """Return the id of a new trace."""
        return _chosen.get() or super().generate_trace_id()


def agreed(cause: int, *parts: str | int) -> Context:
    """Return a context without a span, in which the trace of a failure begins whose id follows from all arguments.

    ``cause``: the id of a trace that all who notice the failure know, which makes the id unique.
    """
    text = "/".join(map(str, (cause, *parts)))
    return _beginning(int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "big"))


def of_failure() -> Context:
    """Return a context without a span, in which the trace of a failure begins."""
    return _beginning(secrets.randbits(128))


def is_kept(trace: int) -> bool:
    """Whether a trace begins with a failure, so that no sampler drops it."""
    return trace & _HALF < KEPT_BELOW


def _beginning(trace: int) -> Context:
    return set_value(_KEY, trace & ~_HALF | trace & KEPT_BELOW - 1, Context())


@contextmanager
def chosen_in(context: Context | None) -> Iterator[None]:
    """Have a trace that begins in the block have the id that ``context``, or else the current one, asks for."""
    token = _chosen.set(int(get_value(_KEY, context) or 0))  # type: ignore[call-overload]
    try:
        yield
    finally:
        _chosen.reset(token)
