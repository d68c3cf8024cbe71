"""What the page and the monitor cost while much happens: synthetic events of many jobs and slots, a real browser.

    python bench/page.py [--quick | --tiny] [--jobs 100] [--slots 1000] [--rate 2000] [--seconds 60]

A process publishes to a real nats-server: of each four events one is an item of a job's history, which the page
receives, and three are progress, which the monitor folds into curves; beside them each host beats once a second. Lag is
the time from the publication of an item until the page has it, which includes the time until nats-server has written
the item to disk. The lag of progress is the age of the newest progress that the monitor has. The browser's memory is
that of its JavaScript heap. On a machine that does other work, look at the processor time that each process needs, and
at the load of the machine.
"""

import asyncio
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

import psutil
from playwright.async_api import Page, async_playwright
from report import Length, Target, argument_parser, conclude, print_table

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.credentials import Credentials, read_credentials
from resile_shared.bus.envelope import encode, headers_for
from resile_shared.bus.nats_server import NatsServer
from resile_shared.bus.subjects import HOSTS, JOBS
from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, Slot, WorkerReport
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobRecord, JobSpec, JobState
from resile_shared.messages.reports import Progress, Ready, Report
from resile_shared.version import VERSION

SLOTS_PER_HOST = 8
SLICES = 20
"""In a second."""
TOKEN = "a-token-for-the-bench-alone"
MAX_LAG_SECONDS = 2.0
MAX_PAGE_MIB = 300.0
MAX_MONITOR_MIB = 500.0
WATCH = """() => {
  window.lags = [];
  window.stored = [];
  window.frames = 0;
  const source = new EventSource("/v1/events?follow=1&tail=0");
  source.onmessage = (message) => {
    const { data, time } = JSON.parse(message.data);
    if (!data.item) return;
    window.lags.push(Date.now() - Date.parse(data.item.time));
    window.stored.push(Date.parse(time) - Date.parse(data.item.time));
  };
  const count = () => { window.frames += 1; requestAnimationFrame(count); };
  count();
  return new Promise((resolve) => { source.onopen = resolve; }).then(() => null);
}"""


class Story:
    """Events of jobs, one after the other."""

    def __init__(self, num_jobs: int, num_slots: int) -> None:
        self.num_jobs = num_jobs
        self.num_hosts = max(1, num_slots // SLOTS_PER_HOST)
        self.per_job = max(1, num_slots // num_jobs)
        self.num_items = [1] * num_jobs
        self.iterations = [0] * num_jobs

    def record(self, number: int) -> JobRecord:
        item = self._item(number)
        spec = JobSpec(name=f"job {number}", package="packages/x", script="train.py", max_workers=self.per_job)
        ready = Ready(
            iterations_total=1_000_000, num_shards=64, batch_size=64, epochs=1, samples=64_000_000, bits="same bits"
        )
        return JobRecord(
            job=f"job-{number + 1}",
            spec=spec,
            state=JobState.RUNNING,
            priority=5000,
            submitted=datetime.now(UTC),
            generation=1,
            num_items=1,
            allocation=item,
            ready=ready,
        )

    def host(self, number: int) -> HostRecord:
        return HostRecord(
            host=f"host-{number + 1}",
            incarnation=1,
            state=HostState.UP,
            address="127.0.0.1",
            slots=tuple(Slot(index=index) for index in range(SLOTS_PER_HOST)),
            device_class="cpu",
            version=VERSION,
            since=datetime.now(UTC),
        )

    def beat(self, number: int, count: int) -> Heartbeat:
        first = number * SLOTS_PER_HOST
        workers = tuple(
            WorkerReport(
                job=f"job-{1 + (first + index) // self.per_job}", worker=first + index, slot=index, state="member"
            )
            for index in range(SLOTS_PER_HOST)
            if (first + index) // self.per_job < self.num_jobs
        )
        return Heartbeat(host=f"host-{number + 1}", incarnation=1, number=count, workers=workers)

    def event(self, count: int) -> tuple[str, JobEvent | Report]:
        """The event of this number: an item of a history, or progress."""
        number = (count // 4) % self.num_jobs
        if count % 4 == 0:
            return subjects.job_event(f"job-{number + 1}", "allocation"), self._job_event(number)
        self.iterations[number] += 1
        content = Progress(iteration=self.iterations[number], epoch=0, loss=1.0, metrics={"accuracy": 0.5})
        report = Report(
            job=f"job-{number + 1}",
            host="host-1",
            incarnation=1,
            worker=0,
            slot=0,
            generation=1,
            time=datetime.now(UTC),
            content=content,
        )
        return subjects.report(report.job, "progress"), report

    def _job_event(self, number: int) -> JobEvent:
        self.num_items[number] += 1
        return JobEvent(
            job=f"job-{number + 1}",
            name=f"job {number}",
            tenant="default",
            state=JobState.RUNNING,
            priority=5000,
            item=self._item(number),
        )

    def _item(self, number: int) -> HistoryItem:
        workers = 1 + (self.num_items[number] % self.per_job)
        first = number * self.per_job
        slots = tuple(f"host-{1 + s // SLOTS_PER_HOST}/{s % SLOTS_PER_HOST}" for s in range(first, first + workers))
        return HistoryItem(
            number=self.num_items[number],
            time=datetime.now(UTC),
            kind="allocation",
            generation=1,
            workers=workers,
            slots=slots,
            iteration=self.iterations[number],
            reason="fair share with job-2",
        )


async def set_up(server: NatsServer, story: Story) -> None:
    """Store the records of hosts and jobs."""
    scheduler = await Bus.open(read_credentials(server.credentials("scheduler")), service="scheduler")
    registry = await Bus.open(read_credentials(server.credentials("registry")), service="registry")
    for number in range(story.num_hosts):
        record = story.host(number)
        await registry.bucket(HOSTS).create(record.host, record)
    for number in range(story.num_jobs):
        stored = story.record(number)
        await scheduler.bucket(JOBS).create(stored.job, stored)
    await registry.close()
    await scheduler.close()


async def publish(scheduler: Credentials, learner: Credentials, story: Story, rate: int, seconds: float) -> int:
    """Publish at the rate, each event once; return how many. JetStream's answers are not waited for."""
    pool, agents = await Bus.open(scheduler, service="s"), await Bus.open(learner, service="l")
    begun = time.monotonic()
    count = 0
    for part in range(int(seconds * SLICES)):
        while count < rate * (part + 1) / SLICES:
            subject, message = story.event(count)
            bus = pool if isinstance(message, JobEvent) else agents
            await bus.connection.send(subject, encode(message), headers=headers_for(message, source="bench"))
            count += 1
        for number in range(part % SLICES, story.num_hosts, SLICES):
            await agents.send(subjects.heartbeat(f"host-{number + 1}"), story.beat(number, part + 1))
        await asyncio.sleep(max(0.0, begun + (part + 1) / SLICES - time.monotonic()))
    await pool.close()
    await agents.close()
    return count


def publisher(
    scheduler: Credentials,
    learner: Credentials,
    shape: tuple[int, int],
    rate: int,
    seconds: float,
    took: "Queue[float]",
) -> None:
    begun = time.monotonic()
    count = asyncio.run(publish(scheduler, learner, Story(*shape), rate, seconds))
    took.put(count / (time.monotonic() - begun))


@asynccontextmanager
async def monitoring(server: NatsServer, folder: Path) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Run a monitor; yields the URL of its API, and its process, once it answers."""
    (folder / "storage").mkdir()
    (folder / "token").write_text(TOKEN)
    url = folder / "url"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "resile_monitor", "--credentials", str(server.credentials("monitor"))),
        *("--storage", (folder / "storage").as_uri(), "--url-file", str(url), "--token-file", str(folder / "token")),
        *("--log-level", "warning"),
    )
    try:
        while not url.exists():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.05)
        yield url.read_text(), psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def page_of(url: str) -> AsyncIterator[Page]:
    """Open the page in Chromium, with a second reader of its events that measures how late they come."""
    flags = ["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=flags, timeout=120_000
        )
        page = await browser.new_page()
        await page.goto(f"{url}/#token={TOKEN}")
        await page.wait_for_selector(".jobs tr >> nth=1", timeout=120_000)
        await page.evaluate(WATCH)
        yield page
        await browser.close()


NEWEST = """async () => {
  const { training } = await (await fetch("/v1/jobs/job-1/curves")).json();
  return training.times.length ? (Date.now() - training.times.at(-1)) / 1000 : 0;
}"""


def processor_seconds(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Return the processor time that processes of each name have used."""
    return {name: sum(sum(process.cpu_times()[:2]) for process in group) for name, group in processes.items()}


async def sampled(
    page: Page, processes: dict[str, list[psutil.Process]], publishing: BaseProcess
) -> tuple[dict[str, float], dict[str, float]]:
    """Follow page and monitor until everything is published; return the maxima, in bytes and seconds.

    Also return the share of a core that the processes of each name needed.
    """
    (monitor,) = processes["monitor"]
    most = {"page": 0.0, "monitor": 0.0, "progress": 0.0, "load": 0.0}
    cpu, begun = processor_seconds(processes), time.monotonic()
    while publishing.is_alive():
        now = {
            "page": await page.evaluate("performance.memory.usedJSHeapSize"),
            "monitor": monitor.memory_info().rss,
            "progress": await page.evaluate(NEWEST),
            "load": os.getloadavg()[0],
        }
        most = {name: max(most[name], now[name]) for name in most}
        await asyncio.sleep(1.0)
    took = time.monotonic() - begun
    busy = {name: (seconds - cpu[name]) / took for name, seconds in processor_seconds(processes).items()}
    return most | {"frames": await page.evaluate("window.frames") / took}, busy


async def until_all_came(page: Page, num: int) -> float:
    """Return for how long items still came after the last was published. At most a minute."""
    begun = time.monotonic()
    while await page.evaluate("window.lags.length") < num and time.monotonic() - begun < 60.0:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return time.monotonic() - begun


async def measure(
    num_jobs: int, num_slots: int, rate: int, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the measurements, and the share of a core that each kind of process needed."""
    with tempfile.TemporaryDirectory() as name:
        server = NatsServer(Path(name) / "bus")
        await server.start()
        try:
            await set_up(server, Story(num_jobs, num_slots))
            async with monitoring(server, Path(name)) as (url, monitor), page_of(url) as page:
                took: Queue[float] = multiprocessing.get_context("spawn").Queue()
                credentials = [read_credentials(server.credentials(role)) for role in ("scheduler", "learner")]
                publishing = multiprocessing.get_context("spawn").Process(
                    target=publisher, args=(*credentials, (num_jobs, num_slots), rate, seconds, took)
                )
                publishing.start()
                assert server.process is not None
                processes = {
                    "monitor": [monitor],
                    "nats-server": [psutil.Process(server.process.pid)],
                    "browser": [each for each in psutil.Process().children(recursive=True) if "chrom" in each.name()],
                }
                found, busy = await sampled(page, processes, publishing)
                found["rate"] = took.get()
                found["behind"] = await until_all_came(page, num=int(rate * seconds) // 4)
                lags, stored = [sorted(await page.evaluate(f"window.{name}")) or [-1000] for name in ("lags", "stored")]
                found |= {"items": await page.evaluate("window.lags.length"), "lag": statistics.median(lags) / 1000}
                found |= {"late": lags[int(0.99 * len(lags))] / 1000, "stored": statistics.median(stored) / 1000}
                return found | {"stored late": stored[int(0.99 * len(stored))] / 1000}, busy
        finally:
            await server.stop()


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--slots", type=int, default=1000)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    length: Length = options.length
    seconds = length.pick(full=options.seconds, quick=15.0, tiny=3.0)
    num_jobs, num_slots, rate = length.pick(
        full=(options.jobs, options.slots, options.rate),
        quick=(options.jobs, options.slots, options.rate),
        tiny=(4, 16, 100),
    )
    found, busy = asyncio.run(measure(num_jobs, num_slots, rate, seconds))
    num_items = int(rate * seconds) // 4
    print_table(
        f"{num_jobs} jobs, {num_slots} slots, {rate} events a second for {seconds:g} s",
        ("", "measured"),
        [
            ("events published a second", f"{found['rate']:.0f}"),
            ("items that the page received", f"{found['items']:.0f} of {num_items}"),
            ("lag of an item in the page, median", f"{found['lag']:.2f} s"),
            ("lag of an item in the page, 99 %", f"{found['late']:.2f} s"),
            ("of it until it is on disk, median", f"{found['stored']:.2f} s"),
            ("of it until it is on disk, 99 %", f"{found['stored late']:.2f} s"),
            ("lag of progress in curves, most", f"{found['progress']:.2f} s"),
            ("after the last event, until the page had all", f"{found['behind']:.2f} s"),
            ("frames a second that the browser drew", f"{found['frames']:.0f}"),
            ("JavaScript heap of the page, most", f"{found['page'] / 2**20:.0f} MiB"),
            ("memory of the monitor, most", f"{found['monitor'] / 2**20:.0f} MiB"),
            *((f"processor time: {name}", f"{100 * share:.0f} % of a core") for name, share in busy.items()),
            (f"load of the machine, most, with {os.cpu_count()} cores", f"{found['load']:.1f}"),
        ],
    )
    conclude(
        [
            Target("items that the page lacks", num_items - found["items"], 0),
            Target("lag of an item in the page, 99 %", found["late"], MAX_LAG_SECONDS, "s"),
            Target("JavaScript heap of the page", found["page"] / 2**20, MAX_PAGE_MIB, "MiB"),
            Target("memory of the monitor", found["monitor"] / 2**20, MAX_MONITOR_MIB, "MiB"),
        ],
        length,
    )


if __name__ == "__main__":
    main()
