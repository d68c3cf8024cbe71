"""The models that jobs have left: where each came from, and how good it is."""

from collections.abc import Iterable

from resile_shared.http.api import ModelList, ModelView
from resile_shared.messages.jobs import JobRecord


def models(records: Iterable[JobRecord]) -> ModelList:
    """Return the models of completed jobs, the newest first."""
    found = [view for record in records if (view := _model(record)) is not None]
    return ModelList(models=tuple(sorted(found, key=lambda view: (view.completed, view.job), reverse=True)))


def _model(record: JobRecord) -> ModelView | None:
    done = record.completed
    if done is None or done.model is None:
        return None
    return ModelView(
        job=record.job,
        name=record.spec.name,
        tenant=record.spec.tenant,
        completed=record.ended or record.submitted,
        iterations=done.iteration,
        samples_seen=done.samples_seen,
        loss=done.loss,
        metrics=done.metrics,
        validation=done.validation,
        params_sha256=done.params_sha256,
        bits=done.bits,
        script=record.spec.script,
        args=record.spec.args,
    )
