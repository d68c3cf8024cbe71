"""The context of a service, in a process of its own."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pytest

from resile_shared.bus.credentials import Credentials, write_credentials
from resile_shared.http.server import MAX_PER_ADDRESS
from resile_shared.messages.commands import Accepted, JobStop
from resile_testing.collector import collecting, collecting_by_grpc
from resile_testing.fixtures import Pool
from resile_testing.samples import samples
from resile_testing.waiting import PATIENCE_SECONDS, until

SERVICE = """
import asyncio
from resile_shared.messages.commands import Accepted, JobStop
from resile_shared.service import ServiceContext, main
from resile_shared.settings import ServiceSettings

async def run(context: ServiceContext[ServiceSettings]) -> None:
    async def stop(received):
        return Accepted(job_id=received.message.job_id)

    await context.bus.answer("resile.command.job.stop", JobStop, stop)
    context.is_ready = True
    try:
        await asyncio.Event().wait()
    finally:
        print("draining", flush=True)
        await asyncio.sleep(0.1)
        print("drained", flush=True)

main("scheduler", ServiceSettings, run)
"""
SENDING = """
        while True:
            await context.bus.connection.send("resile.instruction.host-1", b"{}", headers={})
            await asyncio.sleep(0)
"""
"""What it does instead of waiting: something is being sent when NATS is disconnected."""


CALLING = """
        import threading
        call = asyncio.create_task(asyncio.to_thread(threading.Event().wait))
        await asyncio.sleep(0)
        print("calling", flush=True)
        await call
"""
"""What it does instead of waiting: a call that never returns, as to a storage that does not answer."""


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, str]] = []

    async def logged(self, text: str) -> str:
        assert self.process.stderr is not None
        while not self.log or text not in self.log[-1]["message"]:
            self.log.append(json.loads(await self.process.stderr.readline()))
        return self.log[-1]["message"]


@asynccontextmanager
async def service(credentials: Path, *flags: str, code: str = SERVICE) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "--credentials", str(credentials), "--log-format", "json", *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_service_starts_tells_its_health_and_drains(pool: Pool, tmp_path: Path) -> None:
    health = ("--health-port", "0", "--health-file", str(tmp_path / "health"))
    async with (
        service(pool.server.credentials("scheduler"), *health) as started,
        aiohttp.ClientSession() as http,
    ):
        url = (await started.logged("health check listening")).rpartition("url=")[2].removesuffix("/readyz")
        await until((tmp_path / "health").exists)
        assert (tmp_path / "health").read_text() == url

        async def status(path: str) -> int:
            async with http.get(url + path) as answer:
                return answer.status

        async def becomes(wanted: int) -> None:
            while await status("/readyz") != wanted:  # noqa: ASYNC110 - what other processes do sets no event
                await asyncio.sleep(0.02)

        await becomes(200)
        assert await status("/healthz") == 200
        async with http.get(f"{url}/metrics") as answer:
            found = samples(await answer.read())
        assert (found["resile_ready"], found["resile_bus_connected"]) == (1, 1)
        assert found["process_resident_memory_bytes"] > 0
        await pool.kill()
        await becomes(503)
        assert await status("/healthz") == 200
        await pool.server.start()
        await becomes(200)
        started.process.send_signal(signal.SIGTERM)
        out, err = await started.process.communicate()
        assert (out, started.process.returncode) == (b"draining\ndrained\n", 0)
        last = orjson.loads(err.splitlines()[-1])
        assert (last["message"], last["service"], last["level"]) == ("stopped", "scheduler", "info")


async def test_a_service_that_is_stopped_while_nats_is_away_drains_as_well(pool: Pool) -> None:
    code = SERVICE.replace("        await asyncio.Event().wait()\n", SENDING)
    async with service(pool.server.credentials("scheduler"), code=code) as started:
        await started.logged("started")
        await pool.kill()
        await started.logged("NATS disconnected")
        started.process.send_signal(signal.SIGTERM)
        out, err = await started.process.communicate()
        assert (out, started.process.returncode) == (b"draining\ndrained\n", 0), err
        assert [orjson.loads(line)["message"] for line in err.splitlines()] == ["stopped"]


async def test_a_call_that_never_returns_does_not_keep_a_service_from_stopping(pool: Pool) -> None:
    code = SERVICE.replace("        await asyncio.Event().wait()\n", CALLING)
    async with service(pool.server.credentials("scheduler"), code=code) as started:
        assert started.process.stdout is not None
        assert await started.process.stdout.readline() == b"calling\n"
        started.process.send_signal(signal.SIGTERM)
        out, err = await started.process.communicate()
        assert (out, started.process.returncode) == (b"draining\ndrained\n", 0), err


async def test_a_second_signal_does_not_interrupt_what_the_first_began(pool: Pool) -> None:
    async with service(pool.server.credentials("scheduler")) as started:
        await started.logged("started")
        started.process.send_signal(signal.SIGTERM)
        assert started.process.stdout is not None
        assert await started.process.stdout.readline() == b"draining\n"
        started.process.send_signal(signal.SIGINT)
        out, err = await started.process.communicate()
        assert (out, started.process.returncode) == (b"drained\n", 0), err
        assert [orjson.loads(line)["message"] for line in err.splitlines()] == ["stopped"]


async def test_a_supervised_service_leaves_signals_to_its_supervisor_and_ends_with_stdin(pool: Pool) -> None:
    async with service(pool.server.credentials("scheduler"), "--supervised=true") as started:
        await started.logged("started")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            started.process.send_signal(number)
            await started.logged(f"received {number.name}")
        assert started.process.stdin is not None
        started.process.stdin.close()
        out, err = await started.process.communicate()
        assert (out, started.process.returncode) == (b"draining\ndrained\n", 0), err


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_metrics_and_logs_are_exported_where_that_is_asked(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    with collecting_by_grpc() if protocol == "grpc" else collecting() as collector:
        for name, value in {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_LOGS_EXPORTER": "otlp",
            "OTEL_TRACES_EXPORTER": "none",
        }.items():
            monkeypatch.setenv(name, value)
        async with service(pool.server.credentials("scheduler")) as started:
            await started.logged("started")
            started.process.send_signal(signal.SIGTERM)
            await started.process.communicate()
    assert {"resile_ready", "resile_bus_connected"} <= collector.metrics
    assert {"started", "stopped"} <= set(collector.logs)


async def test_a_service_ends_though_its_collector_does_not_answer(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nothing is read
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for signal_of in ("METRICS", "LOGS"):
            monkeypatch.setenv(f"OTEL_{signal_of}_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "15")
        async with service(pool.server.credentials("scheduler")) as started:
            await started.logged("started")
            started.process.send_signal(signal.SIGTERM)
            _, err = await started.process.communicate()
        assert started.process.returncode == 0
        assert b"the collector did not take the last telemetry" in err


async def test_a_service_does_not_try_again_to_reach_a_collector_when_it_ends(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "8")  # an attempt lasts longer than a service may take to end
    async with service(pool.server.credentials("scheduler")) as started:
        await started.logged("cannot export logs")
        started.process.send_signal(signal.SIGTERM)
        _, err = await started.process.communicate()
    assert started.process.returncode == 0
    assert b"the collector did not take the last telemetry" not in err


async def test_a_collector_of_traces_gets_neither_metrics_nor_logs(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with service(pool.server.credentials("scheduler")) as started:
            await started.logged("started")
            started.process.send_signal(signal.SIGTERM)
            await started.process.communicate()
    assert (collector.metrics, collector.logs) == (set(), [])


async def test_connections_that_say_nothing_do_not_keep_health_checks_out(tmp_path: Path) -> None:
    nowhere = Credentials(url="nats://127.0.0.1:1", user="scheduler", password="x")
    write_credentials(tmp_path / "scheduler.json", nowhere)
    async with service(tmp_path / "scheduler.json", "--health-port", "0") as started, AsyncExitStack() as stack:
        url = (await started.logged("health check listening")).rpartition("url=")[2].removesuffix("/readyz")
        host, port = url.removeprefix("http://").split(":")
        readers = []
        for _ in range(MAX_PER_ADDRESS + 50):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            readers.append(reader)
        async with aiohttp.ClientSession() as http, http.get(f"{url}/healthz") as answer:
            assert answer.status == 200
        assert sum(reader.at_eof() or reader.exception() is not None for reader in readers) >= 50


async def test_a_service_waits_for_its_bus_and_can_be_told_to_end(tmp_path: Path) -> None:
    nowhere = Credentials(url="nats://127.0.0.1:1", user="scheduler", password="x")
    write_credentials(tmp_path / "scheduler.json", nowhere)
    async with service(tmp_path / "scheduler.json", "--health-port", "0") as started:
        await started.logged("health check listening")
        started.process.send_signal(signal.SIGTERM)
        await started.process.communicate()
        assert started.process.returncode == 0


async def test_what_keeps_a_service_from_starting_is_one_line(pool: Pool, tmp_path: Path) -> None:
    wrong = Credentials(url=pool.server.url, user="scheduler", password="wrong")
    write_credentials(tmp_path / "wrong.json", wrong)
    for credentials, flags, status, reason in (
        (tmp_path / "none.json", (), 2, "cannot be read"),
        (tmp_path / "wrong.json", (), 1, "rejects the user 'scheduler'"),
        (pool.server.credentials("scheduler"), ("--health-port", "-1"), 2, "--health-port or RESILE_HEALTH_PORT"),
        (pool.server.credentials("scheduler"), ("--health-port", str(pool.server.port)), 2, "cannot listen on"),
    ):
        async with service(credentials, *flags) as started:
            _, err = await started.process.communicate()
            assert started.process.returncode == status
            assert reason in err.decode().splitlines()[-1]
            assert b"Traceback" not in err


async def test_requests_reach_a_service_after_its_restart(pool: Pool) -> None:
    credentials = pool.server.credentials("scheduler")
    async with service(credentials) as first:
        await first.logged("started")
        publisher = await pool.bus("publisher")
        assert await publisher.ask("resile.command.job.stop", JobStop(job_id="a")) == Accepted(job_id="a")
        first.process.kill()
        await first.process.wait()
    asking = asyncio.create_task(publisher.ask("resile.command.job.stop", JobStop(job_id="b")))
    async with service(credentials):
        await until(asking.done)
    assert asking.result() == Accepted(job_id="b")
