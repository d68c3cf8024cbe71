"""What a machine that wants to join is given, and when it is not."""

from resile_monitor.api.hosts import MAX_PEERS
from resile_shared.bus.credentials import read_credentials
from resile_shared.http.api import Admission
from resile_shared.messages.hosts import HostState
from resile_shared.reachability import listening
from resile_shared.storage.objects import PROBE
from resile_shared.version import VERSION

from .examples import host
from .monitors import Monitor, Monitors, Scene


async def open_monitor(monitors: Monitors) -> Monitor:
    monitors.storage.put(PROBE, [b"this pool"])
    return await monitors.start("--agent-credentials", str(monitors.pool.server.credentials("learner")))


async def test_a_new_host_is_given_what_its_agent_needs(monitors: Monitors, scene: Scene) -> None:
    monitor = await open_monitor(monitors)
    learner = read_credentials(monitors.pool.server.credentials("learner"))
    expected = Admission(
        bus_url=learner.url,
        bus_user="learner",
        bus_password=learner.password,
        storage=monitors.storage.url,
        probe="this pool",
        version=VERSION,
    )
    for body in ({"version": VERSION}, {"version": "0.0.1"}, {"version": "9.9.9", "what": "this version lacks"}):
        status, answer = await monitor.post("/v1/hosts/gpu-7/join", {"incarnation": 0, **body})
        assert (status, Admission.model_validate(answer)) == (200, expected)


async def test_a_host_that_does_not_name_its_version_is_given_nothing(monitors: Monitors, scene: Scene) -> None:
    monitor = await open_monitor(monitors)
    for body in (None, {"incarnation": 0}):
        problem = await monitor.problem("POST", "/v1/hosts/gpu-7/join", json=body)
        assert (problem.status, problem.code) == (409, "conflict")
        assert problem.detail.startswith(
            f"this machine runs an older version of Resile, but its pool runs Resile {VERSION}: install the pool's"
        )


async def test_a_pool_that_is_not_open_to_other_machines_gives_nothing(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    problem = await monitor.problem("POST", "/v1/hosts/gpu-7/join")
    assert (problem.status, problem.code) == (409, "conflict")
    assert "start it with `resile up --listen ADDR`" in problem.detail


async def test_a_name_is_taken_while_its_host_is_there_but_that_host_may_come_back(
    monitors: Monitors, scene: Scene
) -> None:
    await scene.store_host(host(incarnation=3, address="10.0.0.5"))
    monitor = await open_monitor(monitors)
    problem = await monitor.problem("POST", "/v1/hosts/host-1/join", json={"incarnation": 2, "version": VERSION})
    assert (problem.status, problem.code) == (409, "conflict")
    assert problem.detail == "a host named host-1 is already up at 10.0.0.5: choose another name"
    assert (await monitor.post("/v1/hosts/host-1/join", {"incarnation": 3, "version": VERSION}))[0] == 200
    await scene.store_host(host("host-2", incarnation=3, state=HostState.LOST))
    assert (await monitor.post("/v1/hosts/host-2/join", {"version": VERSION}))[0] == 200


async def test_a_host_is_admitted_only_if_it_is_reached_where_its_workers_would_be(
    monitors: Monitors, scene: Scene
) -> None:
    monitor = await open_monitor(monitors)

    async def joins(name: str, **body: object) -> str:
        """Return why the host is refused; empty: it is not."""
        body = {"version": VERSION, "nonce": "it is me", **body}
        status, answer = await monitor.post(f"/v1/hosts/{name}/join", body)
        return "" if status == 200 else str(answer["detail"])

    async with listening("127.0.0.1", "it is me") as port, listening("127.0.0.2", "another") as other:
        await scene.store_host(host(address="127.0.0.1"))
        assert not await joins("far", address="127.0.0.1", port=port), "all hosts are on this machine"
        refused = await joins("far", address="127.0.0.2", port=other)
        assert refused.startswith("workers on far would be at 127.0.0.2, where other hosts do not reach them (another ")
        assert "--address" in refused
        assert "(Connection refused)" in await joins("far", address="127.0.0.3", port=port)
        await scene.store_host(host("host-2", address="192.0.2.7"))
        await monitor.answers("/v1/hosts/host-2", 200)
        assert "(host-2 is on another machine, at 192.0.2.7)" in await joins("far", address="127.0.0.1", port=port)


async def test_a_new_host_is_given_hosts_to_reach_on_different_addresses(monitors: Monitors, scene: Scene) -> None:
    for number in range(1, 25):
        address = f"10.0.0.{number % 20}"
        await scene.store_host(host(f"host-{number:02}", address=address, probe_port=1000 + number))
    await scene.store_host(host("silent", address="10.0.1.1"))
    await scene.store_host(host("gone", address="10.0.1.2", probe_port=7, state=HostState.LOST))
    monitor = await open_monitor(monitors)
    _, answer = await monitor.post("/v1/hosts/host-01/join", {"version": VERSION, "incarnation": 9})
    peers = Admission.model_validate(answer).peers
    assert len(peers) == len({peer.address for peer in peers}) == MAX_PEERS
    assert not {"silent", "gone", "host-01"} & {peer.host for peer in peers}


async def test_a_host_needs_a_name_that_can_be_one(monitors: Monitors, scene: Scene) -> None:
    monitor = await open_monitor(monitors)
    for path, body, words in (
        ("no.host", {"version": VERSION}, "invalid host name 'no.host'"),
        ("host-1", {"incarnation": -1}, "incarnation must be greater"),
    ):
        problem = await monitor.problem("POST", f"/v1/hosts/{path}/join", json=body)
        assert (problem.status, problem.code) == (422, "invalid")
        assert words in problem.detail
