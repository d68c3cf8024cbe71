"""The platform's log file. Most scripts bring a module like this one; it serves those that do not."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from .environment import log_dir


class ELog:
    """Appends lines to ``stdout`` in LOG_DIR, or in its folder ``sub_id``. Made by `open`."""

    def __init__(self, sub_id: str | None, file: TextIO) -> None:
        self.subId = sub_id
        self._file = file

    @staticmethod
    def open(subId: str | None = None) -> "ELog":  # noqa: N803 - the platform's name
        """Open the file, making its folder."""
        folder = log_dir() / (subId or "")
        folder.mkdir(parents=True, exist_ok=True)
        return ELog(subId, Path(folder, "stdout").open("a"))

    def recordText(self, text: str) -> None:  # noqa: N802
        """Append a line, with the time."""
        self._file.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}\n")
        self._file.flush()

    def recordTrain(self, title: str, iteration: int, global_steps: int, *scores: Any) -> None:  # noqa: N802
        """Append a line of training: loss, accuracy and the worker, or a dict of metrics."""
        self.recordText(", ".join([title, f"Global steps: {global_steps}", f"Iteration: {iteration}", *_named(scores)]))

    def recordTest(self, title: str, *scores: Any) -> None:  # noqa: N802
        """Append a line of validation: loss, accuracy and the worker, or a dict of metrics."""
        self.recordText(", ".join([title, *_named(scores)]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "ELog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _named(scores: tuple[Any, ...]) -> list[str]:
    values = scores[0] if scores and isinstance(scores[0], Mapping) else dict(zip(("loss", "accuracy"), scores))  # noqa: B905 - the worker comes third
    return [f"{name.capitalize()}: {float(value):.5f}" for name, value in values.items()]
