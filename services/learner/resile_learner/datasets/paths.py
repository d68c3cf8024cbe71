"""Where a script finds a dataset."""

import os
from pathlib import Path

from resile_shared.errors import UsageError
from resile_shared.messages.datasets import variable_of

from ..session import SoloSession, current_session

_HOME = Path("~/.resile")


def dataset(name: str) -> Path:
    """Return the path of a dataset: its folder, or its file if a single file was registered.

    In a worker, the data that the job was given with ``--data``. In a plain ``python train.py``, the path that the
    variable ``RESILE_DATASET_<NAME>`` has, or else that of the file or folder registered with ``resile dataset add
    --local``. The files may be those of other jobs as well: do not write there. Raises UsageError, with what to do.
    """
    variable = variable_of(name)
    if given := os.environ.get(variable):
        path = Path(given).absolute()
        if not path.exists():
            raise UsageError(f"there is no {path}, which {variable} names: correct the variable")
        return path
    if not isinstance(current_session(), SoloSession):
        raise UsageError(f"this job was not given the dataset {name}: submit it with `--data {name}`")
    from resile_shared.storage.dataset_sources import local_path  # loads the clients of all clouds
    from resile_shared.storage.local_datasets import find_dataset

    try:
        found = find_dataset(Path(os.environ.get("RESILE_HOME", _HOME)), name)
    except UsageError as error:
        raise UsageError(f"{error}, or set {variable} to a folder") from None
    local = local_path(found.uri)
    if local is None:
        raise UsageError(
            f"dataset {name} is at {found.uri}, and a plain run fetches nothing: use `resile run --data {name}`, or "
            f"set {variable} to a folder that has the files"
        )
    if not local.exists():
        raise UsageError(
            f"dataset {name}: there is no {local}: add it again with `resile dataset add {name} PATH --local`"
        )
    return local
