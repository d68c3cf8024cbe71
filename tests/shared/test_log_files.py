"""Logs of processes that append to them for ever stay small."""

import os
from pathlib import Path

import pytest

from resile_shared import log_files
from resile_shared.log_files import limit_logs


def test_a_large_log_is_moved_aside_while_its_service_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MAX_LOG_BYTES", 100)
    log = tmp_path / "registry.log"
    writer = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(writer, b"x" * 101)
    (tmp_path / "being-removed.log").symlink_to("nowhere")
    for name in ("a.log", "z.log"):
        (tmp_path / name).symlink_to(name)
    limit_logs(tmp_path)
    os.write(writer, b"next\n")
    os.close(writer)
    assert log.read_text() == "next\n"
    assert (tmp_path / "registry.log.old").read_bytes() == b"x" * 101
