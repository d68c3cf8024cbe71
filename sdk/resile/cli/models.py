"""The command that lists and compares the models of jobs whose training has ended."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError

from .options import Answer, pool_command

if TYPE_CHECKING:
    from resile_shared.http.api import ModelView

    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None)
_SHORT_SHA = 12


@pool_command(app, short_help="List the models of jobs, or compare some.")
async def models(
    client: "AsyncClient",
    *,
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Compare the models of these jobs side by side.")
    ] = None,
) -> Answer:
    r"""List the models of jobs whose training has ended, newest first; with ids, compare them side by side.

    A job that failed or was stopped after its training has a model too; its state is shown.

    \b
    resile models
    resile models job-3 job-5
    resile model job-5 -o model.safetensors          fetch one
    """
    found = await client.models()
    if not jobs:
        return {"models": found}, _table(found) if found else ["there are no models yet: no training has ended"]
    by_job = {model.job: model for model in found}
    chosen = []
    for name in jobs:
        job = await client.find_model(name)
        if job not in by_job:
            raise UsageError(f"job {job} has no model: `resile models` lists the jobs that have one")
        chosen.append(by_job[job])
    return {"models": chosen}, _side_by_side(chosen)


def _table(models: "Sequence[ModelView]") -> Iterator[str]:
    from .tables import columns, moment, number

    rows = (
        (
            m.job,
            m.name,
            m.state,
            moment(m.completed),
            str(m.iterations),
            number(m.loss),
            _values(m.validation),
            _short(m),
        )
        for m in models
    )
    return columns(("ID", "NAME", "STATE", "ENDED", "ITERATIONS", "LOSS", "VALIDATION", "SHA256"), rows)


def _side_by_side(models: "Sequence[ModelView]") -> Iterator[str]:
    from .tables import columns, moment, number

    rows = [
        ("name", *(model.name for model in models)),
        ("state", *(model.state for model in models)),
        ("ended", *(moment(model.completed) for model in models)),
        ("iterations", *(str(model.iterations) for model in models)),
        ("samples", *(str(model.samples_seen) for model in models)),
        ("loss", *(number(model.loss) for model in models)),
    ]
    for kind in ("metrics", "validation"):
        names = sorted({name for model in models for name in getattr(model, kind)})
        rows += [(f"{kind} {name}", *(number(getattr(model, kind).get(name)) for model in models)) for name in names]
    rows += [
        ("arguments", *(" ".join((model.script, *model.args)) for model in models)),
        ("bits", *(model.bits for model in models)),
        ("sha256", *map(_short, models)),
    ]
    return columns(("", *(model.job for model in models)), rows)


def _values(values: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in values.items()) or "-"


def _short(model: "ModelView") -> str:
    return model.params_sha256[:_SHORT_SHA]
