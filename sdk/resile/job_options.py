"""What a user asks for a job, and the job that it becomes: the client and the command line share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypedDict, Unpack

from pydantic import ValidationError

from resile_shared.errors import UsageError
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.jobs import MAX_WORKERS, JobSpec
from resile_shared.requirements import parse_requirements, read_requirements
from resile_shared.validation import faults

from .package import Package, pack

COMPAT = "RESILE_COMPAT"
"""The environment variable of workers that names a module of `COMPAT_MODULES`: see `worker/bootstrap.py`."""
COMPAT_MODULES = {"ibm-edt": "resile.integrations.ibm_edt"}
"""Modules that give a script the modules and variables of another platform, by the name of its interface."""
_HASH_SEED = "PYTHONHASHSEED"


class JobOptions(TypedDict, total=False):
    """What a job may ask for; what is left out has its default (`resile submit --help`)."""

    name: str
    env: Mapping[str, str]
    compat: str
    """The platform that the script was written for: a key of `COMPAT_MODULES`."""
    requirements: Sequence[str] | Path
    """Requirements beyond the pool's packages, as for pip, or the path of a requirements.txt or pyproject.toml."""
    data: Sequence[str]
    """Names of registered datasets."""
    mounts: Sequence[str]
    """Paths that must exist on the job's hosts."""
    min_workers: int
    max_workers: int
    sizes: Sequence[int]
    gang: int
    """The number of workers of a gang: all start at once, and each runs a script for torchrun (docs/gangs.md)."""
    restartable: bool
    service: Mapping[str, object]
    """What its replicas serve: the fields of `messages.services.Service` (docs/serving.md)."""
    deadline: datetime
    """With a time zone, or in that of this machine."""
    priority: int
    tenant: str
    group: str
    placement: str


class InvalidOptions(UsageError):
    """Options that no job can have."""

    def __init__(self, *faults: str) -> None:
        """Each of ``faults`` begins with the name of an option, or is about the whole job."""
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True)
class PackedJob:
    """A job whose code is packed and whose options are valid; nothing of it was sent."""

    package: Package
    dataset_names: tuple[str, ...]
    fields: Mapping[str, object]

    def spec(self, *, package: str, data: Sequence[Dataset]) -> JobSpec:
        """Return what is submitted when the code is stored as ``package``. Raises InvalidOptions."""
        try:
            return JobSpec.model_validate({**self.fields, "package": package, "data": tuple(data)})
        except ValidationError as error:
            raise InvalidOptions(*faults(error, JobSpec)) from error


def pack_job(path: Path, args: Sequence[str] = (), **options: Unpack[JobOptions]) -> PackedJob:
    """Pack the script or folder at ``path``, and validate ``options``. Raises UsageError."""
    package = pack(path)
    fields: dict[str, object] = {
        "name": path.resolve().name if path.is_dir() else path.stem,
        **options,
        "script": package.script,
        "args": tuple(args),
        "env": worker_environment(options.get("env", {}), options.get("compat")),
        "requirements": _requirements(options.get("requirements", ())),
    }
    if "gang" in options:
        fields |= _gang(options)
    if "deadline" in options:
        fields["deadline"] = _deadline(options["deadline"])
    fields.pop("compat", None)
    job = PackedJob(package, tuple(dict.fromkeys(options.get("data", ()))), fields)
    job.spec(package="validated before the upload", data=())
    return job


def worker_environment(env: Mapping[str, str], compat: str | None = None) -> dict[str, str]:
    """Return the variables of workers: ``env``, and what a script for another platform needs. Raises InvalidOptions."""
    if _HASH_SEED in env:
        raise InvalidOptions(f"env: {_HASH_SEED} cannot be set: it is always 0, so that two runs give the same bits")
    if compat is None:
        return dict(env)
    if compat not in COMPAT_MODULES:
        raise InvalidOptions(f"compat: there is no interface {compat}: use {', '.join(COMPAT_MODULES)}")
    return {**env, COMPAT: COMPAT_MODULES[compat]}


def _requirements(given: Sequence[str] | Path) -> tuple[str, ...]:
    """Return requirements in one spelling. Raises UsageError."""
    if isinstance(given, Path):
        return read_requirements(given)
    try:
        return parse_requirements([given] if isinstance(given, str) else given)
    except ValueError as error:
        raise InvalidOptions(f"requirements: {error}") from error


def _gang(options: JobOptions) -> dict[str, object]:
    """Return the fields of a job whose number of workers never changes. Raises InvalidOptions."""
    num_workers = options["gang"]
    if isinstance(num_workers, bool) or not 1 <= num_workers <= MAX_WORKERS:
        raise InvalidOptions(f"gang must be a number of workers from 1 to {MAX_WORKERS}")
    if {"min_workers", "max_workers", "sizes"} & options.keys():
        raise InvalidOptions(
            f"gang {num_workers}: it always has {num_workers} workers: leave out min_workers, max_workers and sizes"
        )
    return {"gang": True, "min_workers": num_workers, "max_workers": num_workers}


def _deadline(time: datetime) -> datetime:
    time = time.astimezone()
    if time <= datetime.now().astimezone():
        raise InvalidOptions(f"deadline: {time:%Y-%m-%d %H:%M} has passed: give a later time")
    return time
