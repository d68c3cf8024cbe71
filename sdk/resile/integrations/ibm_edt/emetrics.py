"""The platform's metrics file: one JSON object a line."""

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
