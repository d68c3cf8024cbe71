"""Runs the commands of `resile chaos`."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import typer

from resile_shared.messages.jobs import JobSpec

from ..chaos.attacks import Attack, Target, TargetKind
from ..chaos.campaign import Campaign
from ..chaos.causes import report_effects
from ..chaos.injector import AttackInjector
from ..chaos.members import COMMITS_VARIABLE
from ..chaos.observation import Observer
from ..chaos.recovery_watch import RecoveryWatcher
from ..chaos.report import document, keep_evidence, outcome_document, skipped, table
from ..chaos.s3_server import OwnStore
from ..chaos.temporary_pool import temporary_pool
from ..chaos.verdict import Outcome, faults
from ..client import AsyncClient, find_server
from ..package import pack
from .options import logger_beside, print_json
from .tables import columns


@dataclass(frozen=True)
class CampaignOptions:
    """The options of a campaign."""

    seed: int
    minutes: float
    sha256: str | None
    only: frozenset[str]
    """The attacks to choose from; empty: all."""
    object_store: int | None
    as_json: bool


def attack_once(home: Path, attack: Attack, *, object_store: int | None, as_json: bool) -> int:
    """Carry out one attack, and print the recovery times; return the exit status."""

    async def work() -> int:
        async with _connected(home, Random(), object_store) as (injector, client, observer, recovery):
            injector.check(attack.kind, attack.target.what)
            chosen = await _choose(attack, client, injector)
            for job in await client.jobs():
                if not job.state.is_final:
                    observer.follow(job.id)
            async with injector.inject(chosen) as injected:
                if not as_json:
                    ids = f" (processes {' '.join(map(str, injected.processes))})" if injected.processes else ""
                    typer.echo(f"{chosen}{ids}{': ' + injected.detail if injected.detail else ''}")
                recovered = await recovery.wait(injected)
            traces = await report_effects(client, injected, observer.seen)
        if as_json:
            print_json(outcome_document(Outcome(1, injected, recovered, traces)))
        for part in recovered:
            if part.seconds is None:
                print(
                    f"resile: {part.what} has not recovered: see `resile top` and the logs of the pool", file=sys.stderr
                )
            elif not as_json:
                steps = f": see `resile trace {part.what} {traces[part.what][:8]}`" if part.what in traces else ""
                typer.echo(f"{part.what} recovered in {part.seconds:.2f} s{steps}")
        return int(any(part.seconds is None for part in recovered))

    return _run(work())


def campaign(home: Path, job: str, options: CampaignOptions) -> int:
    """Attack a pool that is up; return the exit status."""
    return _run(_campaign(home, [job], options))


def campaign_on_own_pool(
    script: Path,
    args: tuple[str, ...],
    options: CampaignOptions,
    *,
    jobs: int,
    hosts: int,
    slots: int,
    with_s3: bool,
) -> int:
    """Start a pool, attack it, and stop it; return the exit status."""

    async def work() -> int:
        package = await asyncio.to_thread(pack, script)
        log = logger_beside(as_json=options.as_json)
        async with temporary_pool(hosts=hosts, slots=slots, with_s3=with_s3, log=log) as (home, store):
            async with AsyncClient(find_server(home=home)) as client:
                key = await client.upload(package.content)
                account = home.with_name("commits.jsonl")
                spec = JobSpec(
                    name=script.stem,
                    package=key,
                    script=package.script,
                    args=args,
                    env={COMMITS_VARIABLE: str(account)},
                )
                names = [await client.submit(spec) for _ in range(jobs)]
            return await _campaign(home, names, options, account=account, own_store=store)

    return _run(work())


async def _campaign(
    home: Path,
    jobs: Sequence[str],
    options: CampaignOptions,
    *,
    account: Path | None = None,
    own_store: OwnStore | None = None,
) -> int:
    log = logger_beside(as_json=options.as_json)
    rng = Random(options.seed)
    async with _connected(home, rng, options.object_store, own_store) as (injector, client, observer, recovery):
        found_jobs = [await client.find(job) for job in jobs]
        campaign = Campaign(injector, client, observer, recovery, found_jobs, log, account, options.only)
        log(f"seed {options.seed}, {options.minutes:g} minutes, {', '.join(found_jobs)}")
        record = await campaign.run(seed=options.seed, seconds=60 * options.minutes, sha256=options.sha256)
        found = [*faults(record), *([observer.fault] if observer.fault else [])]
    report = document(record, found, seed=options.seed)
    if found:
        kept = keep_evidence(record, report, home=injector.home, account=account)
        report["kept"] = str(kept)
        log(f"logs, jobs, events and what the workers committed are kept in {kept}")
    if options.as_json:
        print_json(report)
    for heading, *rows in (table(record.outcomes), skipped(record)):
        for line in ("", *columns(heading, rows)) if rows else ():
            log(line)
    log("" if record.members is not None else "\nnot checked: the script keeps no account of what its workers commit")
    for fault in found:
        log(f"BROKEN: {fault}")
    if not found:
        log(
            f"all promises held: {len(record.outcomes)} attacks, {len(record.skipped)} not carried out, "
            f"{len(record.jobs)} jobs, each with the bits of an undisturbed run ({record.undisturbed_sha256[:16]}...)"
        )
    return 1 if found else 0


@asynccontextmanager
async def _connected(
    home: Path, rng: Random, object_store: int | None, own_store: OwnStore | None = None
) -> AsyncIterator[tuple[AttackInjector, AsyncClient, Observer, RecoveryWatcher]]:
    injector = AttackInjector(home, rng=rng, object_store=object_store, own_store=own_store)
    async with AsyncClient(find_server(home=injector.home)) as client, Observer.open(client) as observer:
        yield injector, client, observer, RecoveryWatcher(injector.home, client, observer, injector.processes)


async def _choose(attack: Attack, client: AsyncClient, injector: AttackInjector) -> Attack:
    """Replace the name of a job by its id, and choose a worker where none is named."""
    target = attack.target
    if not target.name or target.what.is_of_host:
        return attack
    job = await client.find(target.job)
    name = job + target.name.removeprefix(target.job)
    if target.what is TargetKind.WORKER and "/" not in name:
        workers = injector.processes.workers(job)
        name = f"{job}/{Random().choice(workers).number}" if workers else name
    return replace(attack, target=Target(target.what, name))


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Run ``work``; SIGTERM cancels it as Ctrl-C does, so that nothing stays frozen and no pool is left."""

    async def until_sigterm() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(until_sigterm())
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
