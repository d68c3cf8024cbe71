"""All spans of a pool, as a collector gets them, whatever is done with the pool and to it.

Its hosts are in network namespaces, the clock of one is two seconds behind, and its collector begins to listen late.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from resile.client import AsyncClient, find_server
from resile.pool.namespaces import Namespaces
from resile_shared.policies import PolicyName
from resile_testing.collector import DELAY, ENDPOINT, Collector, collecting, collecting_by_grpc
from tests.span_names import is_known

from .conftest import TRAIN
from .paced import submit
from .pools import UpPool, pool_up
from .test_traces import SLOWLY, early, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

FAILING = "import resile.training\nraise ValueError('on purpose')\n"
BEHIND_SECONDS = 2.0
DETECTION_SECONDS = 4
PART = """
import os, sys, time
if "host-2" in sys.argv or "BEHIND" in os.environ:
    os.environ["BEHIND"] = "yes"
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() - SECONDS, lambda: real_ns() - int(SECONDS * 10**9)
if "COLLECTOR_PORT" in os.environ and "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ:
    import psutil
    for address in psutil.net_if_addrs().get("eth0", ()):
        if address.address.startswith("10.213."):
            gateway = address.address.rsplit(".", 1)[0] + ".1"
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{gateway}:{os.environ['COLLECTOR_PORT']}"
""".replace("SECONDS", str(BEHIND_SECONDS))
"""What Python runs first in each process of the pool: it finds this machine at the end of its cable."""


@pytest.mark.parametrize(("collect", "num_short"), [(collecting, 45), (collecting_by_grpc, 2)])
def test_spans_have_documented_names_and_their_job_and_each_failure_is_one_trace_with_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    collect: Callable[..., AbstractContextManager[Collector]],
    num_short: int,
) -> None:
    script, failing = tmp_path / "train.py", tmp_path / "failing" / "train.py"
    script.write_text(TRAIN)
    failing.parent.mkdir()
    failing.write_text(FAILING)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf" if collect is collecting else "grpc")
    with pool_with_collector(tmp_path, monkeypatch, collect) as (pool, collector):
        assert failures(collector, lambda: succeed_in_every_command(pool, script, tmp_path / "data", num_short)) == []
        services = {span.service for found in collector.traces.values() for span in found}
        assert services == {"monitor", "scheduler", "registry", "learner"}
        for log in (pool.home / "logs").glob("*.log"):
            lines = log.read_text()
            assert lines.count("cannot export traces") == lines.count("exporting traces again") <= 1, log
        assert failures(collector, lambda: refuse(pool)) == []
        assert only(failures(collector, lambda: fail(pool, failing))) == {"job failed", "failed"}

        job = pool.submit(script, "--name", "attacked", "--", *SLOWLY)
        pool.becomes(job, lambda view: view["workers"] >= 4 and view["iteration"] > 5)

        def attack(*arguments: object) -> Callable[[], None]:
            def strike() -> None:
                pool.ask("chaos", *arguments)
                pool.becomes(job, lambda view: view["workers"] >= 4 and view["state"] == "running")

            return strike

        def annoy() -> None:
            for harmless in (
                ("kill", "scheduler"),
                ("kill", "registry"),
                ("kill", "bus"),
                ("freeze", "registry", "--seconds", 1),
                ("terminate", "host", "host-1"),
                ("slow", "scheduler", "--seconds", 2),
            ):
                attack(*harmless)()

        assert failures(collector, annoy) == []
        assert only(failures(collector, attack("kill", "worker", job))) == {"killed", "worker lost"}
        assert only(failures(collector, attack("kill", "host", "host-2"))) == {"host lost"}
        assert only(failures(collector, attack("partition", "host", "host-2", "--seconds", 10))) == {"host lost"}
        assert pool.run("stop", job).status == 0
    spans = [span for found in collector.traces.values() for span in found]
    assert not {name for name in {span.name for span in spans} if not is_known(name)}
    assert not [span for span in spans if "worker" in span.attributes and "job" not in span.attributes]
    assert early(collector) == []
    hosts = {span.resource.get("host") for span in spans}
    assert {"host-1", "host-2"} <= hosts


@contextmanager
def pool_with_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collect: Callable[..., AbstractContextManager[Collector]]
) -> Iterator[tuple[UpPool, Collector]]:
    """Run a pool that looks for its collector at the end of its cables, and then a collector."""
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "sitecustomize.py").write_text(PART)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "part"))
    monkeypatch.setenv("COLLECTOR_PORT", str(free_port()))
    monkeypatch.setenv(DELAY, "1000")
    monkeypatch.delenv(ENDPOINT, raising=False)
    options = ("--namespaces", "--hosts", 2, "--slots", 3, "--open-to-chaos", "--detection-seconds", DETECTION_SECONDS)
    with pool_up(tmp_path / "home", *options) as pool:
        gateway = Namespaces.of(pool.home).address
        with collect(gateway, int(os.environ["COLLECTOR_PORT"])) as collector:
            yield pool, collector


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def failures(collector: Collector, act: Callable[[], None]) -> list[dict[str, str]]:
    """Do something; return the kinds of error of each trace that began with it and has any, with the reasons."""
    before = set(collector.traces)
    act()
    time.sleep(DETECTION_SECONDS)  # the registry may be the last to notice a loss; spans are exported each second
    quiet(collector)
    found = []
    for trace, spans in list(collector.traces.items()):
        errors = {str(span.attributes["error.type"]): span.error for span in list(spans) if span.error}
        if trace not in before and errors:
            found.append(errors)
    return found


def only(found: list[dict[str, str]]) -> set[str]:
    """Return the kinds of error in the only trace that has any."""
    assert len(found) == 1, found
    return set(found[0])


def quiet(collector: Collector) -> None:
    """Wait until no more spans arrive than those of an iteration now and then."""

    def count() -> int:
        return sum(map(len, list(collector.traces.values())))

    counts = [count()]

    def is_quiet() -> bool:
        counts.append(count())
        return len(counts) > 10 and counts[-1] - counts[-10] <= 4

    until(is_quiet)


def refuse(pool: UpPool) -> None:
    """A refusal is no error of the pool."""
    assert pool.run("priority", "job-99", 1).status == 2


def fail(pool: UpPool, script: Path) -> None:
    failed = pool.submit(script)
    pool.becomes(failed, lambda view: view["state"] == "failed")


async def submit_many(pool: UpPool, script: Path, num: int) -> list[str]:
    short = ("--pause", 0.01, "--epochs", 1)
    async with AsyncClient(find_server(home=pool.home)) as client:
        return [await submit(client, script, *short, name=f"short-{n}", max_workers=1 + n % 2) for n in range(num)]


def succeed_in_every_command(pool: UpPool, script: Path, data: Path, num_short: int) -> None:
    jobs = asyncio.run(submit_many(pool, script, num_short))
    for policy in PolicyName:
        assert pool.run("policy", policy.value).status == 0
    assert pool.run("policy", "fairshare").status == 0
    lasting = pool.submit(script, "--name", "lasting", "--max-workers", 2, "--", *SLOWLY)
    for job in jobs:
        pool.completed(job)
    for command in (
        ("tenant", "set", "blue", "--weight", 2),
        ("tenant", "delete", "blue"),
        ("dataset", "add", "nothing", data),
        ("dataset", "remove", "nothing"),
        ("priority", lasting, 20_000),
        ("pause", lasting),
        ("resume", lasting),
        ("drain", "host-1"),
        ("undrain", "host-1"),
        ("stop", lasting),
        ("delete", jobs[0]),
    ):
        ended = pool.run(*command)
        assert ended.status == 0, (command, ended.err)
    webhook = pool.ask("webhook", "add", "http://127.0.0.1:1/")["id"]
    assert pool.run("webhook", "remove", webhook).status == 0
