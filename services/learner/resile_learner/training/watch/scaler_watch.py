"""Refuses gradient scalers that the training call was not given: other workers would scale differently."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.amp import GradScaler

from resile_shared.errors import UsageError

from ...session import current_session


@contextmanager
def watch_scalers(state: Mapping[str, Any]) -> Iterator[None]:
    """In this context only a GradScaler that is a part of ``state`` may scale, unless it is disabled.

    Raises UsageError.
    """
    session = current_session()
    original = GradScaler.scale

    @wraps(original)
    def scale(scaler: GradScaler, outputs: Any) -> Any:
        is_own = current_session() is session  # an exception may keep the context of another run alive
        if is_own and scaler.is_enabled() and not any(part is scaler for part in state.values()):
            raise UsageError(
                "a loss was scaled by a GradScaler that the training call was not given: its steps would act for each "
                "batch, and a worker that joins would scale otherwise. Write prepare(model, optimizer, loader, "
                'grad_scaler=scaler), or ElasticLoop(..., state={"scaler": scaler})'
            )
        return original(scaler, outputs)

    GradScaler.scale = scale  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GradScaler.scale = original  # type: ignore[method-assign]
