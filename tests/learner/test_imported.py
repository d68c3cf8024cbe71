"""What a worker reports as imported, for a template that imports it without the script."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from resile_learner.worker.imported import ImportWatch

MODULE = "sndhdr_of_nobody"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, with one that nobody has imported."""
    (tmp_path / f"{MODULE}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop(MODULE, None)


def watch_import(library: Path) -> ImportWatch:
    watch = ImportWatch(str(library / "script"))
    __import__(MODULE)
    return watch


def test_an_imported_library_is_reported(library: Path) -> None:
    assert MODULE in watch_import(library).imported()


def test_nothing_is_reported_once_a_variable_has_changed(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_import(library)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert watch.imported() == ()


def test_nothing_is_reported_once_the_default_dtype_has_changed(library: Path) -> None:
    watch, before = watch_import(library), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert watch.imported() == ()
    finally:
        torch.set_default_dtype(before)
