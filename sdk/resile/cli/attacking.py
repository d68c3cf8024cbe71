"""What the commands of `resile chaos` do, once it is known what is asked for."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import typer

from resile_shared.errors import ResileError
from resile_shared.messages.jobs import JobSpec

from ..chaos.assault import Assault
from ..chaos.attacks import Attack, Target, What
from ..chaos.campaign import Campaign
from ..chaos.observation import Observer
from ..chaos.own_pool import OwnPool
from ..chaos.recovery import Recovery
from ..chaos.report import document, outcome_document, table
from ..chaos.verdict import Outcome, faults
from ..client import Client, find_server
from ..package import pack
from .options import print_json
from .tables import columns


@dataclass(frozen=True)
class Orders:
    """What a campaign is asked to do."""

    seed: int
    minutes: float
    sha256: str | None
    object_store: int | None
    as_json: bool


def attack_once(home: Path, attack: Attack, *, object_store: int | None, as_json: bool) -> int:
    """Carry out one attack, and tell how long the pool took to recover; return the exit status."""

    async def work() -> int:
        async with _connected(home, Random(), object_store) as (assault, client, observer, recovery):
            assault.check(attack.kind, attack.target.what)
            chosen = await _choose(attack, client, assault)
            for job in await client.jobs():
                if not job.state.is_final:
                    observer.follow(job.id)
            async with assault.strike(chosen) as struck:
                if not as_json:
                    ids = f" (processes {' '.join(map(str, struck.processes))})" if struck.processes else ""
                    typer.echo(f"{chosen}{ids}{': ' + struck.detail if struck.detail else ''}")
                recovered = await recovery.of(struck)
        if as_json:
            print_json(outcome_document(Outcome(1, struck, recovered)))
        for part in recovered:
            if part.seconds is None:
                print(f"resile: {part.what} has not recovered", file=sys.stderr)
            elif not as_json:
                typer.echo(f"{part.what} recovered in {part.seconds:.2f} s")
        return int(any(part.seconds is None for part in recovered))

    return _run(work(), as_json=as_json)


def campaign(home: Path, job: str, orders: Orders) -> int:
    """Attack a pool that is up; return the exit status."""
    return _run(_campaign(home, [job], orders), as_json=orders.as_json)


def campaign_on_own_pool(
    script: Path, args: tuple[str, ...], orders: Orders, *, jobs: int, hosts: int, slots: int
) -> int:
    """Start a pool, attack it, and end it; return the exit status."""

    async def work() -> int:
        package = await asyncio.to_thread(pack, script)
        async with OwnPool(hosts=hosts, slots=slots, tell=_teller(orders)) as pool:
            async with Client(find_server(home=pool.home)) as client:
                key = await client.upload(package.content)
                spec = JobSpec(name=script.stem, package=key, script=package.script, args=args)
                names = [await client.submit(spec) for _ in range(jobs)]
            return await _campaign(pool.home, names, orders)

    return _run(work(), as_json=orders.as_json)


async def _campaign(home: Path, jobs: Sequence[str], orders: Orders) -> int:
    tell = _teller(orders)
    async with _connected(home, Random(orders.seed), orders.object_store) as (assault, client, observer, recovery):
        found_jobs = [await client.find(job) for job in jobs]
        campaign = Campaign(assault, client, observer, recovery, found_jobs, tell)
        tell(f"seed {orders.seed}, {orders.minutes:g} minutes, {', '.join(found_jobs)}")
        evidence = await campaign.run(seed=orders.seed, seconds=60 * orders.minutes, sha256=orders.sha256)
        found = [*faults(evidence), *([observer.fault] if observer.fault else [])]
    if orders.as_json:
        print_json(document(evidence, found, seed=orders.seed))
    heading, *rows = table(evidence.outcomes)
    for line in ("", *columns(heading, rows), ""):
        tell(line)
    for fault in found:
        tell(f"BROKEN: {fault}")
    if not found:
        tell(
            f"all promises held: {len(evidence.outcomes)} attacks, {len(evidence.jobs)} jobs, each with the bits of an "
            f"undisturbed run ({evidence.alone_sha256[:16]}...)"
        )
    return 1 if found else 0


@asynccontextmanager
async def _connected(
    home: Path, chance: Random, object_store: int | None
) -> AsyncIterator[tuple[Assault, Client, Observer, Recovery]]:
    assault = Assault(home, chance=chance, object_store=object_store)
    async with Client(find_server(home=assault.home)) as client, Observer.open(client) as observer:
        yield assault, client, observer, Recovery(assault.home, client, observer, assault.processes)


async def _choose(attack: Attack, client: Client, assault: Assault) -> Attack:
    """Replace the name of a job by its id, and choose a worker where none is named."""
    target = attack.target
    if not target.name or target.what.is_of_host:
        return attack
    job = await client.find(target.job)
    name = job + target.name.removeprefix(target.job)
    if target.what is What.WORKER and "/" not in name:
        workers = assault.processes.workers(job)
        name = f"{job}/{Random().choice(workers).number}" if workers else name
    return replace(attack, target=Target(target.what, name))


def _teller(orders: Orders) -> Callable[[str], None]:
    stream = sys.stderr if orders.as_json else sys.stdout

    def tell(text: str) -> None:
        print(text, file=stream, flush=True)

    return tell


def _run(work: Coroutine[Any, Any, int], *, as_json: bool) -> int:
    """Do it; SIGTERM ends it as Ctrl-C does, so that nothing stays frozen and no pool is left."""

    async def until_told_to_end() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(until_told_to_end())
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except ResileError as error:
        if as_json:
            typer.echo(json.dumps({"error": str(error)}))
        raise
