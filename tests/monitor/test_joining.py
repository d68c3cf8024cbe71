"""What a machine that wants to join is given, and when it is not."""

from resile_shared.bus.credentials import read_credentials
from resile_shared.http.api import Admission
from resile_shared.messages.hosts import HostState
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


async def test_a_host_needs_a_name_that_can_be_one(monitors: Monitors, scene: Scene) -> None:
    monitor = await open_monitor(monitors)
    for path, body, words in (
        ("no.host", {"version": VERSION}, "invalid host name 'no.host'"),
        ("host-1", {"incarnation": -1}, "incarnation must be greater"),
    ):
        problem = await monitor.problem("POST", f"/v1/hosts/{path}/join", json=body)
        assert (problem.status, problem.code) == (422, "invalid")
        assert words in problem.detail
