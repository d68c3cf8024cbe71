"""One job, as a program or a notebook holds it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from resile_shared.errors import ResileError
from resile_shared.http import api
from resile_shared.messages.jobs import JobState

from .http_requests import PATIENCE_SECONDS, Refused, Unreachable, is_outage

if TYPE_CHECKING:
    from .sync_client import Client

LOOK_SECONDS = 0.5


class JobNotCompleted(ResileError):
    """A job failed or was stopped; ``view`` has the traceback in ``details``."""

    def __init__(self, view: api.JobView) -> None:
        super().__init__(f"{view.id} {view.state}: {view.reason}")
        self.view = view


class Job:
    """A job of a pool. Its methods ask the pool each time; nothing is kept."""

    def __init__(self, client: "Client", id_: str) -> None:
        self._client = client
        self.id = id_

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def view(self) -> api.JobView:
        """Return the job as it is now, with the newest 1000 items of its history."""
        return self._client.job(self.id)

    def wait(self, *, timeout: float | None = None) -> api.JobView:
        """Return the job when it has completed. Raises JobNotCompleted, and TimeoutError after ``timeout`` seconds."""
        return self._until_over(lambda view: None, timeout=timeout)

    def watch(self, *, timeout: float | None = None) -> api.JobView:
        """Show slots and loss until the job is over, as a live chart in a notebook, elsewhere as lines of text.

        Returns and raises as `wait` does.
        """
        from .watching import display_for

        return self._until_over(display_for(self.id), timeout=timeout)

    def logs(self, *, tail: int = 100) -> str:
        """Return the newest ``tail`` lines that its workers printed."""
        return "\n".join(entry.text for entry in self._client.logs(self.id, tail=tail))

    def set_priority(self, priority: int) -> None:
        """Change its priority, and so its share of the pool."""
        self._client.set_priority(self.id, priority)

    def pause(self) -> None:
        """Save a checkpoint and release all slots."""
        self._client.pause(self.id)

    def resume(self) -> None:
        """Resume it from its checkpoint."""
        self._client.resume(self.id)

    def stop(self, *, reason: str = "") -> None:
        """Stop it for good."""
        self._client.stop(self.id, reason=reason)

    def save_model(self, file: Path | str) -> Path:
        """Write the final model to ``file``, for torch.load if it ends in .pt, else safetensors; return its path."""
        path = Path(file)
        self._client.save_model(self.id, path)
        return path

    def _until_over(self, show: Callable[[api.JobView], None], *, timeout: float | None) -> api.JobView:
        deadline = None if timeout is None else time.monotonic() + timeout
        view = self.view()
        while True:
            show(view)
            if view.state is JobState.COMPLETED:
                return view
            if view.state.is_final:
                raise JobNotCompleted(view)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} is {view.state} after {timeout:g} s: {view.reason}")
            time.sleep(LOOK_SECONDS)
            view = self._next_view(deadline)

    def _next_view(self, deadline: float | None) -> api.JobView:
        """Return the job as it is now. Wait at most a minute, or until ``deadline``, while the pool does not answer."""
        patience = time.monotonic() + PATIENCE_SECONDS
        end = patience if deadline is None else min(patience, deadline)
        while True:
            try:
                return self.view()
            except (Unreachable, Refused) as error:
                if not is_outage(error) or time.monotonic() > end:
                    raise
            time.sleep(LOOK_SECONDS)
