"""Templates as processes: workers are forked from them as if they had imported all by themselves, or without them."""

import asyncio
import os
import select
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from resile_learner.messages import WorkerConfig
from resile_learner.processes import template_forks
from resile_learner.processes.client import ForkServerClient, ForkServerSettings
from resile_learner.processes.fork_protocol import TemplateContent, TemplateExited, TemplateLoaded
from resile_learner.processes.template_forks import NotForked, TemplateForks
from resile_shared.messages.hosts import WorkerExit
from resile_testing.waiting import until

from .template_modules import write_modules


class Host:
    """A fork server, its templates, and what workers printed."""

    def __init__(self, server: ForkServerClient, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.reports: dict[int, list[TemplateLoaded | TemplateExited]] = {}
        self.lines: list[str] = []

    async def prepare(
        self, *modules: str, head: str = "", number: int = 1, is_urgent: bool = True
    ) -> TemplateLoaded | TemplateExited:
        """Prepare a template; return what it reports."""
        await self.request(*modules, head=head, number=number, is_urgent=is_urgent)
        await until(lambda: self.reports[number])
        return self.reports[number][0]

    async def request(self, *modules: str, head: str = "", number: int = 1, is_urgent: bool = True) -> None:
        script = self.folder / "script.py"
        script.write_text(head)
        content = TemplateContent(modules=modules, script=str(script), directory=str(self.folder), is_urgent=is_urgent)
        self.reports[number] = []
        await self.server.prepare_template(number, content, self.reports[number].append)

    async def run(self, act: str = "tells_imports", *, template: int | None = 1) -> WorkerExit:
        """Run a worker to its end."""
        worker = await self.server.fork(self.config(act, template), lambda stream, line: self.lines.append(line))
        async for _ in worker.messages():
            pass
        return await worker.wait()

    def config(self, act: str, template: int | None = 1) -> WorkerConfig:
        return WorkerConfig(
            job="j",
            worker=0,
            script="/none.py",
            args=(act,),
            directory=str(self.folder),
            storage="file:///none",
            template=template,
        )

    @property
    def template_pid(self) -> int:
        """The process of the only template."""
        (child,) = psutil.Process(self.server.pid).children()
        return child.pid


@pytest_asyncio.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    modules = tmp_path / "modules"
    modules.mkdir()
    write_modules(modules)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{modules}")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # a compiler in this process would have set it
    (tmp_path / "job").mkdir()
    settings = ForkServerSettings(entry=getattr(request, "param", "acting_workers:main"), preload=())
    server = await ForkServerClient.start(log=tmp_path / "log", settings=settings)
    try:
        await server.loaded()
        yield Host(server, tmp_path / "job")
    finally:
        await server.close()
    assert not [child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]


async def test_a_worker_of_a_template_has_its_modules_and_is_a_child_of_the_fork_server(host: Host) -> None:
    ready = await host.prepare("harmless_two", "harmless_one", head='"""A script."""\nimport os\nimport json.tool\n')
    assert isinstance(ready, TemplateLoaded)
    assert ready.num_modules >= 2
    exits = [await host.run() for _ in range(2)]
    assert exits == [WorkerExit(kind="finished")] * 2, host.lines
    parent = host.server.pid
    assert host.lines == [f"harmless_one,harmless_two 1 {parent} own 1"] * 2, "its own socket alone is open"
    await host.run(template=None)
    assert host.lines[-1] == f" None {parent} own 1"


async def test_the_head_of_a_script_is_imported_up_to_its_first_other_statement(host: Host) -> None:
    (host.folder / "mine.py").write_text("raise AssertionError('nothing of the user runs in a template')\n")
    head = "from harmless_one import value\nif TYPE_CHECKING:\n    import raises\nimport mine\nimport harmless_two\n"
    ready = await host.prepare(head=head)
    assert isinstance(ready, TemplateLoaded), ready
    await host.run()
    assert host.lines[0].startswith("harmless_one 1 ")


async def test_a_template_that_is_ended_or_dies_leaves_its_workers_alone(host: Host) -> None:
    for number in (1, 2):
        assert isinstance(await host.prepare("harmless_one", number=number), TemplateLoaded)
        template = host.template_pid
        worker = await host.server.fork(host.config("waits", number), lambda stream, line: None)
        await anext(worker.messages())
        if number == 1:
            await host.server.end_template(1)
        else:
            os.kill(template, signal.SIGKILL)
        await until(lambda template=template: not psutil.pid_exists(template))  # type: ignore[misc]
        assert worker.running_pid
        worker.kill()
        assert (await worker.wait()).kind == "killed"
    await until(lambda: host.reports[2][1:])
    assert "signal 9" in str(host.reports[2][1])
    assert host.reports[1][1:] == []


REFUSALS = {
    "starts_thread": "2 threads",
    "opens_socket": "socket",
    "opens_file": "opens_file.py",
    "makes_folder": "temporary folder",
    "starts_process": "1 processes",
    "raises": "not today",
    "leaves": "SystemExit",
    "dies": "signal 9",
    "draws": "random generator of python",
    "takes_memory": "MemoryError",
    "is_not_there": "No module named 'is_not_there'",
    "harmless_two": "harmless_one is imported here",
}


async def test_what_cannot_be_forked_is_refused_with_the_reason(host: Host) -> None:
    for number, (module, reason) in enumerate(REFUSALS.items()):
        report = await host.prepare(module, number=number)
        assert isinstance(report, TemplateExited), module
        assert reason in report.reason, module
        assert report.is_refused == (module != "dies")
        assert (await host.run(template=number)).kind == "finished"
        assert host.lines[-1].startswith(f" None {host.server.pid} own"), "forked without the template"


async def test_what_the_head_draws_is_drawn_once_before_the_script_goes_on(host: Host) -> None:
    assert isinstance(await host.prepare(head="import draws\n"), TemplateLoaded)
    await host.run()
    assert host.lines[0].startswith("draws 1 ")


async def test_beside_training_a_template_takes_its_time(host: Host) -> None:
    assert isinstance(await host.prepare("harmless_one", is_urgent=False), TemplateLoaded)
    await host.run()
    assert host.lines[0].startswith("harmless_one 1 ")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_workers_are_forked_without_a_template_that_is_killed_or_stopped_meanwhile(
    host: Host, number: signal.Signals
) -> None:
    await host.prepare("harmless_one")
    template = host.template_pid
    os.kill(template, signal.SIGSTOP)  # so that it has the requests, and has done nothing about them
    running = [asyncio.create_task(host.run()) for _ in range(3)]
    await asyncio.sleep(0.1)
    os.kill(template, number)
    assert [exit_.kind for exit_ in await asyncio.gather(*running)] == ["finished"] * 3
    assert host.lines == [f" None {host.server.pid} own 1"] * 3, "each has its own socket alone"
    await until(lambda: not psutil.pid_exists(template))
    await until(lambda: isinstance(host.reports[1][-1], TemplateExited))


async def test_a_worker_that_is_killed_before_it_is_there_does_not_stay(host: Host) -> None:
    await host.prepare("harmless_one")
    os.kill(template := host.template_pid, signal.SIGSTOP)
    worker = await host.server.fork(host.config("waits"), lambda stream, line: None)
    worker.kill()
    await asyncio.sleep(0.1)
    os.kill(template, signal.SIGCONT)
    assert (await worker.wait()).kind == "killed"


def test_a_worker_that_is_killed_while_it_is_handed_back_is_killed_once_it_is_there() -> None:
    """It was forked, and lived on: nobody kills it twice."""
    forks = TemplateForks(select.poll())
    for process in (6, 7):
        forks.fork(1, process, [])  # no such template any more
    forks.kill(7)
    handed_back = [outcome.worker for outcome in forks.poll(set()) if isinstance(outcome, NotForked)]
    assert [(worker.process, worker.is_killed) for worker in handed_back] == [(6, False), (7, True)]
    for worker in handed_back:
        worker.close()


@pytest.mark.parametrize("host", ["slow_newborns:main"], indirect=True)
async def test_a_new_worker_is_spared_when_what_another_one_left_is_killed(host: Host) -> None:
    await host.prepare("harmless_one")
    template = host.template_pid
    ending = await host.server.fork(host.config("waits", None), lambda stream, line: None)
    await anext(ending.messages())
    running = asyncio.create_task(host.run())
    children = psutil.Process(host.server.pid).children
    await until(lambda: [child for child in children() if os.getsid(child.pid) == template != child.pid])
    ending.kill()
    assert (await ending.wait()).kind == "killed"
    assert (await running).kind == "finished"
    assert host.lines[0].startswith("harmless_one 1 "), "forked from its template"


async def test_temporary_files_of_a_worker_go_with_it_and_those_of_others_stay(host: Host) -> None:
    """They stayed until the fork server ended: in a pool after weeks."""
    assert isinstance(await host.prepare("asks_for_temporary_folder"), TemplateLoaded)
    workers = []
    for number, template in enumerate((1, 1, None)):
        config = host.config("leaves_temporary_files", template)
        workers.append(await host.server.fork(config, lambda stream, line: host.lines.append(line)))
        await until(lambda number=number: len(host.lines) > number)  # type: ignore[misc]
    folders = [Path(line.split()[0]) for line in host.lines]
    for worker, folder in zip(workers, folders, strict=True):
        assert (folder / "data").exists()
        worker.kill()
        assert (await worker.wait()).kind == "killed"
        await until(lambda folder=folder: not folder.parent.exists())  # type: ignore[misc]
    (kernels,) = {Path(line.split()[1]) for line in host.lines}
    assert kernels.parent == folders[0].parent.parent, "what torch.compile compiles is for all workers"


async def test_whatever_a_worker_leaves_is_removed_and_ends_no_other(host: Host) -> None:
    other = await host.server.fork(host.config("waits"), lambda stream, line: None)
    await anext(other.messages())
    for _ in range(2):
        worker = await host.server.fork(
            host.config("leaves_deep_folders"), lambda stream, line: host.lines.append(line)
        )
        assert (await worker.wait()).status == 0
    folders = [Path(line) for line in host.lines]
    await until(lambda: not [path for path in folders[0].parent.iterdir() if path.name.startswith(".removed")])
    assert not [folder for folder in folders if folder.exists()]
    other.kill()
    assert (await other.wait()).kind == "killed"


async def test_a_job_that_sets_tmpdir_keeps_it(host: Host) -> None:
    config = host.config("leaves_temporary_files").model_copy(update={"env": {"TMPDIR": str(host.folder)}})
    worker = await host.server.fork(config, lambda stream, line: host.lines.append(line))
    await until(lambda: bool(host.lines))
    worker.kill()
    await worker.wait()
    assert Path(host.lines[0].split()[0]).parent == host.folder


async def test_a_template_that_never_gets_ready_can_be_ended(host: Host) -> None:
    await host.request("stops")
    await until(lambda: psutil.Process(host.server.pid).children())
    template = host.template_pid
    await until(lambda: psutil.Process(template).status() == psutil.STATUS_STOPPED)
    await host.server.end_template(1)
    await until(lambda: not psutil.pid_exists(template))
    assert (await host.run()).kind == "finished"


async def test_templates_die_with_their_fork_server(host: Host) -> None:
    await host.prepare("harmless_one")
    template = host.template_pid
    os.kill(host.server.pid, signal.SIGKILL)
    await until(lambda: not psutil.pid_exists(template))
    await until(lambda: host.reports[1][1:])
    assert str(host.reports[1][1].reason) == "its fork server ended"  # type: ignore[union-attr]


def test_a_template_is_given_up_soon_enough() -> None:
    assert template_forks.FORK_SECONDS <= 5
