"""The environment of a script for IBM's Elastic Distributed Training: modules, folders, variables."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from resile.training.extend import current_session

_MODULES = Path(__file__).with_name("modules")


def activate(env: Mapping[str, str]) -> None:
    """Let the script of this process import the platform's modules, and set the platform's variables.

    The script's own folder is first in ``sys.path``, so that a script may bring its own ``elog`` or ``emetrics``. What
    the job sets in ``env`` stays, and so does DATA_DIR of the host. Folders to write to lie below RESILE_OUTPUT_DIR,
    from where a pool uploads them, or, in a plain run, in a new folder with the name of the run.
    """
    sys.path.insert(1, str(_MODULES))
    job = current_session().job
    result = Path(os.environ.get("RESILE_OUTPUT_DIR", job)).absolute()
    own = {
        "RESULT_DIR": str(result),
        "LOG_DIR": str(result / "logs"),
        "JOB_STATE_DIR": str(result),
        "SAVED_MODEL_DIR": str(result / "model"),
        "FABRIC_HOME": str(_MODULES),
        "TRAINING_ID": job,
        "DLI_EXECID": job,
    }
    os.environ.update({name: value for name, value in own.items() if name not in env})
    os.environ.setdefault("DATA_DIR", sys.path[0])
    for name in ("RESULT_DIR", "LOG_DIR"):
        os.makedirs(os.environ[name], exist_ok=True)


def result_dir() -> Path:
    """Where the run's files go: RESULT_DIR, or the current folder."""
    return Path(os.environ.get("RESULT_DIR", "."))


def log_dir() -> Path:
    """Where metrics and log lines go: LOG_DIR, or ``logs`` in JOB_STATE_DIR, or in the current folder."""
    return Path(os.environ.get("LOG_DIR") or Path(os.environ.get("JOB_STATE_DIR", "."), "logs"))
