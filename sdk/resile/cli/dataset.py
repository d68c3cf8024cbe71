"""The commands that register the data of jobs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError

from .options import DEFAULT_HOME, AsJson, Home, Server, reach, show

if TYPE_CHECKING:
    from resile_shared.messages.datasets import Dataset

    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Register the data that jobs train on.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and -.")]
Local = Annotated[
    bool, typer.Option("--local", help="For `resile run` and `python` on this machine, instead of the pool.")
]


@app.command("add", short_help="Register data under a name.")
def add(
    name: Name,
    uri: Annotated[
        str,
        typer.Argument(
            metavar="URI", help="A path that the hosts have, s3://, gs://, az://, or pool:FOLDER of the pool's storage."
        ),
    ],
    *,
    local: Local = False,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Register the current data under NAME, for `resile submit --data NAME`. Repeat the command to use new files.

    \b
    resile dataset add mnist s3://datasets/mnist
    resile dataset add mnist /srv/mnist                    a path that every host has
    resile dataset add pictures pool:jobs/job-7/output     a folder of the pool's storage
    resile dataset add mnist ~/data/mnist --local          for `resile run` and `python train.py`

    Each host fetches it once, and scripts find it with resile.training.dataset("NAME"): docs/data.md.
    """
    from resile_shared.storage.dataset_sources import source_uri

    source = source_uri(uri)

    async def work(client: "AsyncClient") -> "Dataset":
        return await client.add_dataset(name, source)

    added = _add_locally(name, source, home) if local else reach(work, server=server, home=home)
    show(added, _table([added]), as_json=as_json)


@app.command("list", short_help="List the datasets.")
def list_datasets(
    *, local: Local = False, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False
) -> None:
    """List the datasets that are registered."""
    from resile_shared.storage.local_datasets import read_datasets

    async def work(client: "AsyncClient") -> "Sequence[Dataset]":
        return await client.datasets()

    found = list(read_datasets(home).values()) if local else reach(work, server=server, home=home)
    lines = _table(found) if found else ["there are no datasets: add one with `resile dataset add NAME URI`"]
    show({"datasets": found}, lines, as_json=as_json)


@app.command("remove", short_help="Remove a dataset; its files stay where they are.")
def remove(
    name: Name, *, local: Local = False, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False
) -> None:
    """Remove a dataset from the list. Its files stay, and so do jobs that have it."""
    from resile_shared.storage.local_datasets import changing_datasets, find_dataset

    async def work(client: "AsyncClient") -> None:
        await client.remove_dataset(name)

    if local:
        with changing_datasets(home) as registered:
            find_dataset(home, name)
            registered.pop(name, None)
    else:
        reach(work, server=server, home=home)
    show({"name": name}, [f"{name} is removed"], as_json=as_json)


def _add_locally(name: str, uri: str, home: Path) -> "Dataset":
    from pydantic import ValidationError

    from resile_shared.storage.dataset_sources import list_source
    from resile_shared.storage.local_datasets import changing_datasets

    try:
        added = list_source(uri).registered(name, uri)
    except ValidationError as error:
        raise UsageError(
            f"{name} is not a valid name of a dataset: use up to 63 lower-case letters, digits and -"
        ) from error
    with changing_datasets(home) as registered:
        registered[name] = added
    return added


def _table(datasets: "Sequence[Dataset]") -> list[str]:
    from .tables import columns

    rows = [(each.name, str(each.num_files), f"{each.num_bytes:,}", each.uri) for each in datasets]
    return list(columns(("NAME", "FILES", "BYTES", "SOURCE"), rows))
