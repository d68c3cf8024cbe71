"""Hosts in network namespaces, with a real pool and a real job: cables are cut, and the job keeps its promises."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from resile.client import AsyncClient, find_server
from resile.pool.namespaces import Namespaces
from resile_shared.messages.hosts import HostState

from .paced import host_becomes
from .pools import UpPool, pool_up
from .trials import Trial, trying

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

NUM_HOSTS = 3
CHANGES = {"allocation", "recovering", "queued"}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    """Three hosts of one slot, each in a namespace; so are the services and the bus."""
    with pool_up(tmp_path_factory.mktemp("cut") / "home", "--namespaces", "--hosts", NUM_HOSTS, "--slots", 1) as pool:
        yield pool


@pytest.fixture
def network(pool: UpPool) -> Namespaces:
    """The cables of the pool."""
    return Namespaces.of(pool.home)


@pytest_asyncio.fixture
async def trial(pool: UpPool, trial_script: Path, tmp_path: Path, network: Namespaces) -> AsyncIterator[Trial]:
    async with AsyncClient(find_server(home=pool.home)) as client:
        for number in range(1, NUM_HOSTS + 1):
            await host_becomes(client, f"host-{number}", lambda host: host.state is HostState.UP)
        async with trying(client, trial_script, tmp_path, num_hosts=NUM_HOSTS) as trial:
            yield trial
            network.mend_all()


async def test_a_host_that_is_cut_off_is_left_behind_and_comes_back_anew(
    trial: Trial, network: Namespaces, trial_sha: str
) -> None:
    await trial.spreads()
    incarnation = (await trial.host("host-1")).incarnation
    network.cut("host-1")
    view = await trial.goes_on(workers=NUM_HOSTS - 1)
    assert not any(slot.startswith("host-1/") for slot in view.slots)
    await host_becomes(trial.client, "host-1", lambda host: host.state is HostState.LOST)
    network.mend("host-1")
    await host_becomes(
        trial.client, "host-1", lambda host: host.state is HostState.UP and host.incarnation > incarnation
    )
    await trial.goes_on(workers=NUM_HOSTS)
    await trial.keeps_its_promises(trial_sha)


async def test_two_hosts_that_cannot_talk_do_not_train_together_until_they_can(
    trial: Trial, network: Namespaces, trial_sha: str
) -> None:
    await trial.spreads()
    network.cut_between("host-1", "host-2")
    view = await trial.goes_on(workers=NUM_HOSTS - 1)
    assert "host-3/0" in view.slots
    assert {host.state for host in await trial.client.hosts()} == {HostState.UP}
    network.mend_between("host-1", "host-2")
    await trial.goes_on(workers=NUM_HOSTS)
    await trial.keeps_its_promises(trial_sha)


async def test_the_loss_of_one_direction_is_the_loss_of_both(trial: Trial, network: Namespaces, trial_sha: str) -> None:
    await trial.spreads()
    network.cut_one_way("host-3", "host-2")
    view = await trial.goes_on(workers=NUM_HOSTS - 1)
    assert "host-1/0" in view.slots
    network.mend_one_way("host-3", "host-2")
    await trial.goes_on(workers=NUM_HOSTS)
    await trial.keeps_its_promises(trial_sha)


async def test_a_slow_host_is_waited_for(trial: Trial, network: Namespaces, trial_sha: str) -> None:
    await trial.spreads()
    before = len((await trial.client.job(trial.job)).history)
    network.slow("host-2", "1mbit")
    await trial.goes_on(workers=NUM_HOSTS)
    network.unslow("host-2")
    after = await trial.goes_on(workers=NUM_HOSTS)
    assert not CHANGES & {item.kind for item in after.history[before:]}
    await trial.keeps_its_promises(trial_sha)


async def test_a_cut_off_bus_stops_nobody_and_nobody_is_lost(trial: Trial, network: Namespaces, trial_sha: str) -> None:
    before = await trial.spreads()
    incarnations = {host.id: host.incarnation for host in await trial.client.hosts()}
    network.cut("bus")
    await trial.trains_on_unseen()
    network.mend("bus")
    after = await trial.goes_on(workers=NUM_HOSTS)
    assert after.generation == before.generation
    assert {host.id: host.incarnation for host in await trial.client.hosts()} == incarnations
    await trial.keeps_its_promises(trial_sha)
