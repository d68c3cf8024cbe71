"""The commands that fetch the results of a job."""

import os
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import ResileError, UsageError
from resile_shared.text import printable

from .options import DEFAULT_HOME, Answer, AnyJob, AsJson, Home, Server, pool_command, reach, show

if TYPE_CHECKING:
    from resile_shared.http.api import JobView

    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None)


@pool_command(app, short_help="Show how often every sample was used.")
async def ledger(client: "AsyncClient", job: AnyJob) -> Answer:
    """Show for each epoch of a job how many samples were used once, more than once, and never."""
    from .tables import ledger_table

    view = await client.ledger(await client.find(job, newest=True))
    return view, ledger_table(view)


@app.command(short_help="Fetch the trained model.")
def model(
    job: AnyJob,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write it: FILE.pt for torch.load, else safetensors."
        ),
    ],
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Fetch the trained model of a job whose training has ended.

    A job that fails or is stopped after its training has its model nevertheless; the command says so.

    \b
    resile model digits-7f3a2c -o model.safetensors
    resile model digits-7f3a2c -o model.pt           for torch.load
    """
    if output.is_dir():
        raise UsageError(
            f"-o {output} is a folder: give the name of a file in it, such as {output / 'model.safetensors'}"
        )
    _check_writable(output)

    async def work(client: "AsyncClient") -> "JobView":
        found = await client.find_model(job)
        await client.save_model(found, output)
        return await client.job(found)

    view = reach(work, server=server, home=home)
    if view.state.value != "completed":
        typer.echo(printable(f"{view.id} {_end_of(view)}"), err=True)
    show({"model": str(output), "state": view.state}, [f"the model is {output}"], as_json=as_json)


@app.command(short_help="Fetch what the workers wrote to RESILE_OUTPUT_DIR.")
def output(
    job: AnyJob,
    *,
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write the files to.")],
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Fetch the files that the workers of a job wrote to the folder RESILE_OUTPUT_DIR.

    \b
    resile output digits-7f3a2c -o results/
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"-o {folder} is a file: give the name of a folder")
    if not folder.is_dir():
        _check_writable(folder)

    async def work(client: "AsyncClient") -> int:
        with tempfile.TemporaryDirectory(prefix="resile-") as scratch:
            archive = Path(scratch) / "output.tar"
            await client.save_output(await client.find(job, newest=True), archive)
            return _unpack(archive, folder)

    num_files = reach(work, server=server, home=home)
    from .tables import count

    show({"output": str(folder), "files": num_files}, [f"{count(num_files, 'file')} in {folder}"], as_json=as_json)


def _end_of(view: "JobView") -> str:
    """Say what became of a job that has a model and did not complete."""
    if not view.state.is_final:
        return f"is {view.state}: its training has ended, and its script has not"
    return f"{view.state} although its training had ended: {view.reason}"


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"-o {path}: the folder {path.parent} does not exist: create it")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"-o {path}: the folder {path.parent} is not writable")


def _unpack(archive: Path, folder: Path) -> int:
    folder.mkdir(exist_ok=True)
    try:
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
            return sum(member.isfile() for member in files)
    except tarfile.TarError as error:
        raise ResileError(f"the output cannot be unpacked into {folder}: {error}") from error
