"""Chooses the target of a planned attack among what is running."""

from collections.abc import Sequence

from resile_shared.errors import ResileError
from resile_shared.messages.jobs import DEFAULT_PRIORITY

from .attacks import Attack, AttackKind, Target, TargetKind
from .plan import PlannedAttack
from .processes import PoolProcesses


def choose_attack(planned: PlannedAttack, jobs: Sequence[str], processes: PoolProcesses) -> Attack:
    """Return the attack; its target belongs to ``jobs``. Raises ResileError if nothing of that kind is running."""
    names = _names(planned, jobs, processes)
    if not names:
        raise ResileError(f"no {planned.what} is running")
    name = _pick(planned, names)
    return Attack(
        planned.kind,
        Target(planned.what, name),
        seconds=planned.seconds,
        other=_other(planned, name, processes),
        priority=1 + int(planned.pick * 2 * DEFAULT_PRIORITY) if planned.kind is AttackKind.PRIORITY else 0,
    )


def _names(planned: PlannedAttack, jobs: Sequence[str], processes: PoolProcesses) -> Sequence[str]:
    own = [worker for worker in processes.workers() if worker.job in jobs]
    match planned.what:
        case TargetKind.WORKER:
            return [f"{worker.job}/{worker.number}" for worker in own]
        case TargetKind.HOST if planned.kind is AttackKind.KILL_LATE:
            return sorted({worker.host for worker in own})
        case TargetKind.AGENT | TargetKind.HOST:
            return sorted(processes.hosts())
        case TargetKind.JOB | TargetKind.OBJECT_STORE:
            return jobs
        case _:
            return [""]


def _other(planned: PlannedAttack, name: str, processes: PoolProcesses) -> str:
    """Return the part of the network from which a host is cut off. Raises ResileError if there is none."""
    if planned.kind is AttackKind.CUT_BUS:
        return "bus"
    if planned.kind not in (AttackKind.CUT_PEER, AttackKind.CUT_ONE_WAY):
        return ""
    others = [host for host in sorted(processes.hosts()) if host != name]
    if not others:
        raise ResileError("the attack needs a second host, and there is none")
    return _pick(planned, others)


def _pick(planned: PlannedAttack, names: Sequence[str]) -> str:
    return names[int(planned.pick * len(names))]
