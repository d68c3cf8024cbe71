"""Resuming: the newest complete checkpoint of a run, read into the run's state."""

import time

from resile_shared.storage import StorageError

from ..messages import Warned
from ..session import Session
from ..state.run import RunState
from .store import CheckpointStore, Loaded, NoneWholeError

RETRY_SECONDS = 5.0
"""Between two attempts to read a checkpoint from a storage that cannot be reached."""


def load_newest(session: Session, store: CheckpointStore, state: RunState) -> bool:
    """Load the newest complete checkpoint into ``state``, waiting for a storage that cannot be reached.

    Damaged checkpoints are skipped with a warning. Returns False, with ``state`` unchanged, if there is none to load.
    """
    flat = state.flatten()
    before = [tensor.clone() for tensor in flat.tensors]
    try:
        loaded = _read_newest(session, store, state)
    except NoneWholeError as error:
        for tensor, content in zip(flat.tensors, before, strict=True):
            tensor.copy_(content)
        _warn(session, f"{error}: training starts over from the beginning")
        return False
    if loaded is None:
        return False
    for skipped in loaded.skipped:
        used = loaded.manifest.checkpoint.name
        _warn(session, f"checkpoint {skipped.name} is damaged ({skipped.reason}); the older {used} is used")
    state.load(loaded.skeleton, loaded.tensors)
    return True


def _read_newest(session: Session, store: CheckpointStore, state: RunState) -> Loaded | None:
    while True:
        try:
            return store.load_newest(state.allocate_buffers)
        except StorageError as error:
            if not error.transient:
                raise
            _warn(session, f"the job is waiting for its checkpoint: {error}")
            time.sleep(RETRY_SECONDS)


def _warn(session: Session, message: str) -> None:
    session.report(Warned(worker=session.view.me, message=message))
