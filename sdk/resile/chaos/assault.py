"""Carries out one attack on a pool on this machine. What lasts is held, and undone, by a process of its own."""

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

from resile_shared.errors import ResileError, UsageError

from ..pool.home import RunningPool, read_pool
from ..pool.namespaces import Namespaces
from .attacks import PROCESS_KINDS, Attack, Kind, What, check
from .holding import Hold
from .processes import PoolProcesses
from .recovery import Struck
from .stored import Checkpoints, space_of_its_own


class Assault:
    """Attacks the pool in ``home``. Raises UsageError when it is not one that may be attacked."""

    def __init__(self, home: Path, *, chance: Random, object_store: int | None = None) -> None:
        self.home = home.expanduser().absolute()
        self.pool = attackable(self.home)
        self.processes = PoolProcesses(self.pool.pid, object_store=object_store)
        self.storage = (self.home / "storage-url").read_text()
        self._chance = chance

    def check(self, kind: Kind, what: What) -> None:
        """Raise UsageError if this pool cannot be attacked so."""
        check(kind, what)
        if kind in (Kind.PARTITION, Kind.SLOW_LINK):
            network = Namespaces.of(self.home)
            if not what.is_of_host:
                network.part(what.value)
        if what is What.OBJECT_STORE and kind in PROCESS_KINDS and self.processes.object_store is None:
            raise UsageError(
                f"{kind} object-store: it is no process of the pool: name the local server that serves the storage, "
                "with --object-store-pid"
            )
        if kind is Kind.DISK_FULL:
            space_of_its_own(self.storage)

    @asynccontextmanager
    async def strike(self, attack: Attack) -> AsyncIterator[Struck]:
        """Attack; what lasts is over behind the block at the latest. Raises ResileError where nothing can be hit."""
        self.check(attack.kind, attack.target.what)
        aim = await asyncio.to_thread(self._aim, attack)
        if attack.kind.lasts:
            async with _holding(self._hold(aim)) as since:
                yield replace(aim, since=since, until=since + attack.seconds)
            return
        detail = ""
        if attack.kind is Kind.CORRUPT:
            detail = await asyncio.to_thread(Checkpoints(self.storage, attack.target.job).corrupt, self._chance)
        since = time.time()
        if attack.kind is Kind.KILL:
            for pid in aim.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        yield replace(aim, since=since, until=since, detail=detail)

    def _aim(self, attack: Attack) -> Struck:
        """Find out whom the attack will hit."""
        target = attack.target
        hits_processes = attack.kind in PROCESS_KINDS
        processes = self.processes.victims(target) if hits_processes or target.what.is_of_host else []
        workers: defaultdict[str, set[int]] = defaultdict(set)
        for worker in self.processes.workers():
            on_it = target.what.is_of_host and worker.host == target.name
            if on_it or (target.what.is_of_job and worker.pid in processes):
                workers[worker.job].add(worker.number)
        return Struck(
            attack,
            since=0.0,
            until=0.0,
            processes=tuple(processes),
            workers={job: frozenset(numbers) for job, numbers in workers.items()},
            incarnation=self._incarnation(target.name) if target.what.is_of_host else 0,
        )

    def _incarnation(self, host: str) -> int:
        try:
            return int((self.home / "hosts" / host / "incarnation").read_text())
        except (OSError, ValueError):
            return 0

    def _hold(self, aim: Struck) -> Hold:
        attack = aim.attack
        what = attack.target.what
        return Hold(
            kind=attack.kind,
            seconds=attack.seconds,
            processes=aim.processes,
            with_descendants=what is What.HOST,
            home=self.home,
            part=attack.target.name if what.is_of_host else what.value,
            rate=attack.rate,
            ballast=space_of_its_own(self.storage) if attack.kind is Kind.DISK_FULL else Path(),
        )


@asynccontextmanager
async def _holding(hold: Hold) -> AsyncIterator[float]:
    """Hold an attack at most while the block runs; give when it began."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "resile.chaos.holding", hold.model_dump_json()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is for whoever started it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if not await process.stdout.readline():
            said = (await process.stderr.read()).decode(errors="replace").strip()
            raise ResileError(f"{hold.kind} did not work: {said.rpartition(chr(10))[2] or 'it said nothing'}")
        yield time.time()
    finally:
        process.stdin.close()
        await asyncio.shield(process.wait())


def attackable(home: Path) -> RunningPool:
    """Return the pool that runs in ``home``. Raises UsageError unless it was started to be attacked."""
    pool = read_pool(home)
    if pool is None or not Path(f"/proc/{pool.pid}").exists():
        raise UsageError(
            f"no pool is running in {home}: start one on this machine that may be attacked, with "
            "`resile up --open-to-chaos`"
        )
    if not pool.chaos:
        raise UsageError(
            f"the pool in {home} may not be attacked: only one that was started with `resile up --open-to-chaos` may"
        )
    return pool
