"""Pools that break a promise: each patch takes one protection away, or puts a hole back.

`sitecustomize.py` applies the patch that `WRONG_POOL` names in each process of a pool, when the module is imported. A
campaign must condemn every one of them (`make chaos-wrong`).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Wrong:
    """``patch`` is called with each of ``modules`` when it has been imported; ``fault`` is what a verdict must say."""

    modules: tuple[str, ...]
    patch: Callable[[Any], None]
    fault: str
    """A regular expression."""
    attacks: tuple[str, ...] = ("kill worker",)
    """Those that a campaign needs to find it."""


def _replace(owner: Any, **attributes: Any) -> None:
    """Set ``attributes``, each of which takes and returns the same as what it replaces."""
    for name, replacement in attributes.items():
        assert hasattr(owner, name), f"{owner} has no {name} any more: adapt the patch"
        was, now = inspect.signature(getattr(owner, name)), inspect.signature(replacement)
        is_same = _parameters(was) == _parameters(now) and now.return_annotation in (was.return_annotation, Any)
        assert is_same, f"{owner}.{name} is {was}, and its replacement {now}: adapt the patch"
        setattr(owner, name, replacement)


def _parameters(signature: inspect.Signature) -> list[tuple[str, Any]]:
    return [(parameter.name, parameter.kind) for parameter in signature.parameters.values()]


def _ledger_counts_twice(ledger: Any) -> None:
    commit = ledger.Ledger.commit

    def twice(self: Any, epoch: int, indices: Any) -> None:
        commit(self, epoch, indices)
        if self.samples_seen % 7 == 0:
            commit(self, epoch, indices)

    _replace(ledger.Ledger, commit=twice)


def _stored_model_is_another(model: Any) -> None:
    save = model.safetensors.torch.save_file

    def save_other(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> Any:
        save({name: tensor + 1 for name, tensor in tensors.items()}, filename, metadata)

    _replace(model.safetensors.torch, save_file=save_other)


def _completion_names_another_model(worker_reports: Any) -> None:
    on_completed = worker_reports.WorkerReports._on_completed

    def other(self: Any, job: Any, report: Any, completed: Any, now: float) -> None:
        on_completed(self, job, report, completed.model_copy(update={"params_sha256": "0" * 64}), now)

    _replace(worker_reports.WorkerReports, _on_completed=other)


def _bits_depend_on_the_number_of_workers(model: Any) -> None:
    from resile_learner.session import current_session

    update = model.ElasticModel._update

    def perturbed(self: Any, clip_grad_norm: float | None, *, ends_epoch: bool) -> None:
        for parameter in self._model.parameters():
            parameter.grad.mul_(1 + 1e-6 * current_session().view.size)
        update(self, clip_grad_norm, ends_epoch=ends_epoch)

    _replace(model.ElasticModel, _update=perturbed)


def _an_event_is_not_published(outbox: Any) -> None:
    publish = outbox.Outbox._publish

    async def skip(self: Any, record: Any, items: Any) -> None:
        await publish(self, record, tuple(item for item in items if item.number != 4))

    _replace(outbox.Outbox, _publish=skip)


def _an_event_is_published_twice(outbox: Any) -> None:
    publish = outbox.Outbox._publish

    async def repeat(self: Any, record: Any, items: Any) -> None:
        twice = tuple(item for item in items for _ in range(2 if item.number == 4 else 1))
        await publish(self, record, twice)

    _replace(outbox.Outbox, _publish=repeat)


def _a_pause_is_forgotten(worker_reports: Any) -> None:
    on_checkpoint = worker_reports.WorkerReports._on_checkpoint

    def forget(self: Any, job: Any, checkpoint: Any, now: float) -> None:
        on_checkpoint(self, job, checkpoint.model_copy(update={"pausing": False}), now)

    _replace(worker_reports.WorkerReports, _on_checkpoint=forget)


def _a_priority_is_ignored(job_commands: Any) -> None:
    def ignore(self: Any, job: Any, priority: int, now: float) -> None:
        pass

    _replace(job_commands.JobCommands, _change_priority=ignore)


def _a_submission_is_forgotten(job_commands: Any) -> None:
    submit = job_commands.JobCommands.submit

    def forget(self: Any, event: Any, *, now: float) -> Any:
        if len(self._pool.jobs) < 2:
            return submit(self, event, now=now)
        return job_commands.Accepted(job_id=f"job-{1000 + len(self._pool.jobs)}")

    _replace(job_commands.JobCommands, submit=forget)


def _a_slot_is_given_twice(module: Any) -> None:
    if module.__name__.endswith("core.state.pool"):

        def free_slots(self: Any) -> module.SlotsByHost:
            return {name: sorted(h.slots) for name, h in self.hosts.items() if h.is_usable and h.is_heard}

        def is_free(self: Any, slot: Any) -> bool:
            return bool(self.is_usable(slot)) and bool(self.hosts[slot.host].is_heard)

        def add_worker(self: Any, job: Any, worker: Any) -> None:
            self.holders.pop(worker.slot, None)
            add(self, job, worker)

        def release(self: Any, job: Any) -> None:
            for worker in job.workers.values():
                self.holders.setdefault(worker.slot, (job.id, worker.number))
            give_up(self, job)

        add, give_up = module.Pool.add_worker, module.Pool.release
        _replace(module.Pool, free_slots=free_slots, is_free=is_free, add_worker=add_worker, release=release)
        return

    def start(self: Any, allocation: Any, placement: Any, now: float) -> Any:
        self.workers[allocation.job, placement.worker] = module.Worker(placement.slot)
        return [module.StartWorker(allocation.job, placement.worker, placement.slot)]

    _replace(module.AgentCore, _start=start)


def _workers_that_are_dropped_live_on(runner: Any) -> None:
    import asyncio

    from resile_shared.messages.hosts import WorkerExit

    def kill(self: Any, job: str, worker: int) -> None:
        run = self._runs.get((job, worker))
        if run is not None and not run.is_killed:
            run.is_killed = True
            gone = WorkerExit(kind="left", message="it was asked to leave")
            task = asyncio.ensure_future(self._observer.on_exit(job, worker, gone))
            self._tasks.add(task)
            task.add_done_callback(self._on_done)

    _replace(runner.WorkerRunner, kill=kill)


def _a_checkpoint_lacks_a_part(store: Any) -> None:
    put_part = store.CheckpointStore.put_part

    def put(self: Any, name: str, number: int, buffers: Sequence[memoryview]) -> Any:
        stored = put_part(self, name, number, buffers)
        if number == 0:
            self._objects.put(store.part_key(name, number), [b"torn"])
        return stored

    _replace(store.CheckpointStore, put_part=put)


def _checkpoints_are_ignored(store: Any) -> None:
    def find_nothing(self: Any, allocate: Any, *, lineage: int | None = None, known: Any = None) -> store.Found:
        return store.Found(None)

    _replace(store.CheckpointStore, load_newest=find_nothing)


WRONG: dict[str, Wrong] = {
    "ledger counts twice": Wrong(
        ("resile_learner.training.data.ledger",), _ledger_counts_twice, "did not use every sample once"
    ),
    "stored model is another": Wrong(
        ("resile_learner.checkpoint.final_model",),
        _stored_model_is_another,
        "the stored model of .* its completion says",
    ),
    "completion names another model": Wrong(
        ("resile_scheduler.core.worker_reports",),
        _completion_names_another_model,
        "its completion says|an undisturbed run with",
    ),
    "bits depend on the number of workers": Wrong(
        ("resile_learner.training.model",),
        _bits_depend_on_the_number_of_workers,
        "has another model than worker|an undisturbed run with",
    ),
    "an event is not published": Wrong(
        ("resile_shared.bus.outbox",), _an_event_is_not_published, "is numbered|have the numbers"
    ),
    "an event is published twice": Wrong(
        ("resile_shared.bus.outbox",), _an_event_is_published_twice, "is numbered|have the numbers"
    ),
    "a pause is forgotten": Wrong(
        ("resile_scheduler.core.worker_reports",),
        _a_pause_is_forgotten,
        "pause job-.* had not recovered",
        ("pause job",),
    ),
    "a priority is ignored": Wrong(
        ("resile_scheduler.core.job_commands",),
        _a_priority_is_ignored,
        "priority job-.* had not recovered",
        ("priority job",),
    ),
    "a submission is forgotten": Wrong(
        ("resile_scheduler.core.job_commands",), _a_submission_is_forgotten, "was accepted, and is lost", ("stop job",)
    ),
    "a slot is given twice": Wrong(
        ("resile_scheduler.core.state.pool", "resile_learner.agent.core"),
        _a_slot_is_given_twice,
        "host-./.: worker .* was started at .* lives",
        ("stop job",),
    ),
    "workers that are dropped live on": Wrong(
        ("resile_learner.processes.runner",),
        _workers_that_are_dropped_live_on,
        "slots, and was seen with the workers",
        ("stop job",),
    ),
    "checkpoints are ignored": Wrong(
        ("resile_learner.checkpoint.store",), _checkpoints_are_ignored, "beside a complete checkpoint", ("kill job",)
    ),
    "a checkpoint lacks a part": Wrong(
        ("resile_learner.checkpoint.store",),
        _a_checkpoint_lacks_a_part,
        "was seen with a manifest and without all its parts",
    ),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Patches modules after they are executed."""

    def __init__(self, wrong: Wrong) -> None:
        self._wrong = wrong

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as usual, and have it patched."""
        if name not in self._wrong.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._wrong.patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(name: str) -> None:
    """Patch the modules of the wrong pool ``name`` as they are imported."""
    sys.meta_path.insert(0, _Finder(WRONG[name]))
