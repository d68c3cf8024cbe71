"""The platform's files of a training run: log lines for people, and metrics of one JSON object a line."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TextIO

from .environment import log_dir, result_dir

_TYPES = {int: 2, float: 3}
"""The numbers by which the file names the types of values; texts have none."""


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


class EMetrics:
    """Appends metrics to ``evaluation-metrics.txt`` in LOG_DIR, or in its folder ``sub_id``. Made by `open`.

    With a ``sub_id``, the test metrics are also written to ``val_dict_list.json`` in RESULT_DIR when it is closed.
    """

    TEST_GROUP: ClassVar = "test"
    TRAIN_GROUP: ClassVar = "train"

    def __init__(self, sub_id: str | None, file: TextIO) -> None:
        self.subId = sub_id
        self.trainingId = os.environ.get("TRAINING_ID", "")
        self._file = file
        self._tests: list[dict[str, Any]] = []

    @staticmethod
    def open(subId: str | None = None) -> "EMetrics":  # noqa: N803 - the platform's name
        """Open the file, making its folder."""
        folder = log_dir() / (subId or "")
        folder.mkdir(parents=True, exist_ok=True)
        return EMetrics(subId, Path(folder, "evaluation-metrics.txt").open("a"))

    def record(self, group: str, iteration: int, values: Mapping[str, Any]) -> None:
        """Append the ``values`` of ``group`` at ``iteration``."""
        meta = {"training_id": self.trainingId, "time": int(time.time() * 1000), "rindex": 1}
        line = {
            "meta": meta | ({"subid": str(self.subId)} if self.subId else {}),
            "grouplabel": group,
            "etimes": {"iteration": _typed(iteration), "time_stamp": _typed(time.strftime("%Y-%m-%dT%H:%M:%S"))},
            "values": {name: _typed(value) for name, value in values.items()},
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if group == self.TEST_GROUP:
            self._tests.append({"steps": iteration, **values})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self.subId:
            result_dir().mkdir(parents=True, exist_ok=True)
            Path(result_dir(), "val_dict_list.json").write_text(json.dumps(self._tests, default=float))

    def __enter__(self) -> "EMetrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _typed(value: Any) -> dict[str, Any]:
    plain = value.item() if hasattr(value, "item") else value
    named = {"type": _TYPES[type(plain)]} if type(plain) in _TYPES else {}
    return {**named, "value": str(plain)}
