"""Carries out one attack on a pool on this machine. A separate process applies a lasting attack, and undoes it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from resile_learner.checkpoint.manifest import FOLDER
from resile_shared.errors import ResileError, UsageError

from ..pool.home import RunningPool, read_pool
from ..pool.namespaces import Namespaces
from .attacks import PROCESS_KINDS, Attack, AttackKind, TargetKind, check
from .lasting_attack import LastingAttack
from .processes import PoolProcesses
from .recovery_watch import InjectedAttack
from .s3_server import OwnStore
from .storage_attacks import Checkpoints, fill_file, folder_of

_SIGNALS = {
    AttackKind.KILL: (signal.SIGKILL,),
    AttackKind.KILL_LATE: (signal.SIGKILL,),
    AttackKind.TERMINATE: (signal.SIGTERM, signal.SIGINT),
}
"""What is sent to the victims of an attack."""


class AttackInjector:
    """Attacks the pool in ``home``. Raises UsageError unless it was started with ``--open-to-chaos``."""

    def __init__(
        self, home: Path, *, rng: Random, object_store: int | None = None, own_store: OwnStore | None = None
    ) -> None:
        self.home = home.expanduser().absolute()
        self.pool = attackable(self.home)
        self.own_store = own_store
        self.processes = PoolProcesses(self.pool.pid, object_store=own_store.pid if own_store else object_store)
        self.storage = (self.home / "storage-url").read_text()
        self._chance = rng

    def check(self, kind: AttackKind, what: TargetKind) -> None:
        """Raise UsageError if this attack is not possible on this pool."""
        check(kind, what)
        if kind.cuts:
            network = Namespaces.of(self.home)
            if not what.is_of_host:
                network.part(what.value)
        if what is TargetKind.OBJECT_STORE and kind in PROCESS_KINDS and self.processes.object_store is None:
            raise UsageError(
                f"{kind} object-store: the store is not a process of the pool: pass the process id of the local server "
                "with --object-store-pid"
            )
        if kind is AttackKind.DISK_FULL:
            fill_file(self._disk_of(what))
        if kind is AttackKind.UNMOUNT:
            folder_of(self.storage, kind)

    def _disk_of(self, what: TargetKind) -> Path:
        return self.home / "bus" if what is TargetKind.BUS else folder_of(self.storage, AttackKind.DISK_FULL)

    @asynccontextmanager
    async def inject(self, attack: Attack) -> AsyncIterator[InjectedAttack]:
        """Attack; a lasting attack ends with the block at the latest. Raises TargetNotRunning."""
        self.check(attack.kind, attack.target.what)
        aim = await asyncio.to_thread(self._find_victims, attack)
        if attack.kind.lasts:
            async with _attack_process(self._hold(aim)) as since:
                yield replace(aim, since=since, until=since + attack.seconds)
            return
        detail = ""
        if attack.kind is AttackKind.CORRUPT:
            damage = await asyncio.to_thread(Checkpoints(self.storage, attack.target.job).corrupt, self._chance)
            aim = replace(aim, damaged=damage.iteration)
            detail = damage.text
        since = time.time()
        for number in _SIGNALS.get(attack.kind, ()):
            for pid in aim.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if attack.kind.kills and attack.target.what is TargetKind.OBJECT_STORE and self.own_store is not None:
            await self.own_store.start()
            self.processes.object_store = self.own_store.pid
        has_waited = self.own_store is not None or attack.kind is AttackKind.TERMINATE
        yield replace(aim, since=since, until=time.time() if has_waited else since, detail=detail)

    def _find_victims(self, attack: Attack) -> InjectedAttack:
        """Find the victims of the attack."""
        target = attack.target
        hits_processes = attack.kind in PROCESS_KINDS or attack.kind is AttackKind.DUPLICATE
        processes = self.processes.victims(target) if hits_processes or target.what.is_of_host else []
        workers: defaultdict[str, set[int]] = defaultdict(set)
        for worker in self.processes.workers():
            on_it = target.what.is_of_host and worker.host == target.name
            if on_it or (target.what.is_of_job and worker.pid in processes):
                workers[worker.job].add(worker.number)
        return InjectedAttack(
            attack,
            since=0.0,
            until=0.0,
            processes=tuple(processes),
            workers={job: frozenset(numbers) for job, numbers in workers.items()},
            incarnation=self.incarnation(target.name) if target.what.is_of_host else 0,
        )

    def incarnation(self, host: str) -> int:
        """Return the newest incarnation of a host, 0 if there is none."""
        try:
            return int((self.home / "hosts" / host / "incarnation").read_text())
        except (OSError, ValueError):
            return 0

    def _hold(self, aim: InjectedAttack) -> LastingAttack:
        attack = aim.attack
        what = attack.target.what
        return LastingAttack(
            kind=attack.kind,
            seconds=attack.seconds,
            processes=aim.processes,
            with_descendants=what is TargetKind.HOST,
            home=self.home,
            part=attack.target.name if what.is_of_host else what.value,
            other=attack.other,
            rate=attack.rate,
            ballast=fill_file(self._disk_of(what)) if attack.kind is AttackKind.DISK_FULL else Path(),
            folder=self._checkpoints(attack) if attack.kind is AttackKind.UNMOUNT else Path(),
        )

    def _checkpoints(self, attack: Attack) -> Path:
        folder = folder_of(self.storage, attack.kind) / "jobs" / attack.target.job / FOLDER
        if not folder.exists():
            raise UsageError(f"{attack.kind}: {attack.target.job} has stored no checkpoint: wait for the first one")
        return folder


@asynccontextmanager
async def _attack_process(lasting: LastingAttack) -> AsyncIterator[float]:
    """Run a lasting attack for at most the duration of the block; yield its start time."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "resile.chaos.lasting_attack", lasting.model_dump_json()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the parent
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if not await process.stdout.readline():
            output = (await process.stderr.read()).decode(errors="replace").strip()
            raise ResileError(f"{lasting.kind} failed: {output.rpartition(chr(10))[2] or 'no error output'}")
        yield time.time()
    finally:
        process.stdin.close()
        await asyncio.shield(process.wait())


def attackable(home: Path) -> RunningPool:
    """Return the pool that runs in ``home``. Raises UsageError unless it may be attacked."""
    pool = read_pool(home)
    if pool is None or not Path(f"/proc/{pool.pid}").exists():
        raise UsageError(f"no pool is running in {home}: start one on this machine with `resile up --open-to-chaos`")
    if not pool.chaos:
        raise UsageError(
            f"the pool in {home} may not be attacked: start it with `resile up --open-to-chaos` to allow that"
        )
    return pool
