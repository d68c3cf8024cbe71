"""What the documentation walks people through, on a real pool: with curl alone, and in a notebook."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from resile import Client
from resile.client import find_server

from .conftest import TRAIN
from .paced import CALLBACK, Pace
from .pools import UpPool, pool_up

ROOT = Path(__file__).parents[2]
PACED = (
    (CALLBACK + TRAIN)
    .replace("callbacks=[Pause()]", "callbacks=[Pace(options.pace)]")
    .replace('parser.add_argument("--epochs", type=int, default=3)', 'parser.add_argument("pace")')
    .replace("epochs=options.epochs", "epochs=40")
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    """A pool of one slot."""
    with pool_up(tmp_path_factory.mktemp("pool") / "home", "--slots", 1) as running:
        yield running


@pytest.mark.long
def test_curl_alone_submits_watches_changes_the_priority_and_fetches_the_model(
    pool: UpPool, tmp_path: Path, until: Callable[..., None]
) -> None:
    """Another job holds the only slot until the priority has changed, so that it changes before the job is over."""
    (tmp_path / "train.py").write_text(TRAIN)
    holder = tmp_path / "code" / "holder.py"
    holder.parent.mkdir()
    holder.write_text(PACED)
    pace = Pace(tmp_path / "pace")
    section = (ROOT / "docs/api.md").read_text().split("## From code to a model, with curl alone")[1]
    script = section.split("```sh\n")[1].split("```")[0]
    server = find_server(home=pool.home)
    with Client(server) as client:
        held = client.submit_script(holder, args=[str(pace.file)])
        until(lambda: held.view().workers == 1)
        environment = {**os.environ, "URL": server.url, "TOKEN": server.token}
        with subprocess.Popen(
            ["sh", "-euc", script], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        ) as walking:
            try:
                priorities = lambda: [job.priority for job in client.jobs() if job.name == "by-curl"]  # noqa: E731
                until(lambda: priorities() == [8000] or walking.poll() is not None)
                pace.fast_until(10**6)
                out, _ = walking.communicate(timeout=200)
            finally:
                walking.kill()
        assert walking.returncode == 0, out
        assert "sha " in out, "the log was shown"
        job = client.get_job("by-curl")
        assert job.view().priority == 8000
        assert job.save_model(tmp_path / "again").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.nightly
@pytest.mark.long
def test_the_notebook_runs(pool: UpPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = find_server(home=pool.home)
    monkeypatch.setenv("RESILE_SERVER", server.url)
    monkeypatch.setenv("RESILE_TOKEN", server.token)
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {cell.id: str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"}
    assert "'host-1'" in shown["cell-1"]
    assert "1 class is not enough: use --classes 2" in shown["cell-5"]
    assert shown["cell-7"].count("<svg") == 2
    assert "completed" in shown["cell-7"]
    assert "'0.weight': (32, 16)" in shown["cell-9"].replace('"', "'")
    assert "mended" in shown["cell-10"]
    assert (tmp_path / "model.safetensors").exists()
