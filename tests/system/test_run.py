"""`resile run` with real workers: the same bits however it goes, and what the user sees of it."""

import asyncio
import os
import pty
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open

from resile.local.events import Noted, Printed, Progressed, Rescaled, RunEvent
from resile.local.run import LocalRun
from resile.local.settings import RunSettings
from resile.pool.worker_processes import workers_below
from resile_learner.agent.host_devices import TorchDevices
from resile_learner.agent.host_templates import HostTemplates, Imports
from resile_learner.messages import WorkerConfig
from resile_scheduler.policies.plan import PlanStep
from resile_shared import log_files
from resile_shared.errors import UsageError

from .conftest import TRAIN
from .running import run

FIELDS = {
    "id", "name", "state", "priority", "min_workers", "max_workers", "workers", "generation", "iteration",
    "iterations_total", "epoch", "samples_seen", "loss", "params_sha256", "history", "ledger", "metrics",
    "validation", "model", "bits", "error", "batches", "output",
}  # fmt: skip


def worker_pids(launcher: int) -> list[int]:
    """Process ids of the workers that run, by number."""
    found = sorted(workers_below(launcher, ""), key=lambda worker: worker.number)
    return [worker.pid for worker in found]


def read_until(stream: Any, text: str) -> None:
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"it ended without saying {text!r}")


def interrupted(resile: Any, process: Any) -> Any:
    """Press Ctrl-C once ``process`` trains; return how the run ended, with a checkpoint from which it resumes."""
    read_until(process.stdout, "first iteration")
    process.send_signal(signal.SIGINT)
    ended = resile.finish(process)
    assert ended.status == 130
    assert ended.last_error.startswith("resile: stopped at iteration ")
    assert "resumes from the newest checkpoint" in ended.last_error
    return ended


def test_a_plan_changes_shape_at_its_iterations_and_gives_the_same_bits(resile: Any, undisturbed: str) -> None:
    ended = resile.run("run", resile.script(), "--plan", "0:1,5:4,12:3,20:2", "--json", "-o", "model.safetensors")
    assert ended.status == 0, ended.err
    document = ended.json
    assert set(document) == FIELDS
    assert document["params_sha256"] == undisturbed
    assert document["batches"] == []
    changes = [(item["iteration"], item["workers"]) for item in document["history"] if item["kind"] == "allocation"]
    assert changes == [(0, 1), (5, 4), (12, 3), (20, 2)]
    assert [item["number"] for item in document["history"]] == [1, 2, 3, 4, 5, 6]
    reasons = [(item["kind"], item["reason"]) for item in document["history"]]
    assert reasons == [
        ("accepted", ""), ("allocation", "start"), ("allocation", "plan 5:4"), ("allocation", "plan 12:3"),
        ("allocation", "plan 20:2"), ("completed", ""),
    ]  # fmt: skip
    assert document["history"][2]["slots"] == ["local/0", "local/1", "local/2", "local/3"]
    assert document["state"] == document["history"][-1]["kind"] == "completed"
    assert (document["min_workers"], document["max_workers"], document["workers"]) == (1, 4, 2)
    assert document["ledger"]["epochs"] == [
        {"epoch": epoch, "samples": 480, "once": 480, "more": 0, "never": 0} for epoch in range(3)
    ]
    assert document["iteration"] == document["iterations_total"] == 30
    with safe_open(resile.folder / "model.safetensors", "pt") as model:
        assert sorted(model.keys()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert list(resile.temporary.iterdir()) == []


def test_the_script_is_heard_once_and_everything_is_kept(resile: Any, undisturbed: str) -> None:
    ended = resile.run("run", resile.script(), "--workers", "3")
    assert ended.status == 0, ended.err
    assert ended.out.count("script starts") == 1
    assert f"sha {undisturbed}" in ended.out
    assert "iteration 0: 3 workers (generation 1)" in ended.out
    assert "every sample exactly once in every epoch" in ended.out
    (run,) = (resile.home / "runs").iterdir()
    for worker in range(3):
        assert "script starts" in (run / "logs" / f"worker-{worker}.log").read_text()
    assert (resile.home.stat().st_mode & 0o777) == 0o700


def test_quiet_leaves_only_what_the_script_prints(resile: Any, undisturbed: str) -> None:
    ended = resile.run("run", "--quiet", "-w", "1", resile.script(), "--", "--epochs", "3")
    assert ended.out == f"script starts\nfirst iteration\nsha {undisturbed}\n"


def test_arguments_variables_and_folder_reach_the_script(resile: Any) -> None:
    script = resile.script(
        "import os, sys\nprint(sys.argv, os.environ['COLOR'], os.getcwd(), __name__, os.environ['PYTHONHASHSEED'])\n"
    )
    ended = resile.run("run", script, "-w", "1", "--env", "COLOR=red", "--", "--lr", "0.1")
    assert f"['{script}', '--lr', '0.1'] red {resile.folder} __main__ 0" in ended.out


ENDING = """
import atexit, pickle, threading
from concurrent.futures import ThreadPoolExecutor

class Saved:
    pass

def save(name):
    time.sleep(0.3)
    with open(f"{os.environ['RESILE_TEST_FOLDER']}/{os.getpid()}-{name}", "wb") as file:
        pickle.dump(Saved(), file)
    print(name, "saved", flush=True)

atexit.register(lambda: print("script ends", flush=True))
threading.Thread(target=save, args=("thread",)).start()
ThreadPoolExecutor().submit(save, "pool")
"""


def test_a_script_ends_with_its_threads_as_with_python(resile: Any) -> None:
    script = resile.script(f"import os{TRAIN}{ENDING}")
    saved = resile.folder / "saved"
    saved.mkdir()
    ended = resile.run(
        "run", script, "-w", "2", "--env", f"RESILE_TEST_FOLDER={saved}", "--", "--epochs", "1", "--shards", "2"
    )
    assert ended.status == 0, ended.err
    assert sorted(file.name.split("-")[1] for file in saved.iterdir()) == ["pool", "pool", "thread", "thread"]
    assert all(b"Saved" in file.read_bytes() for file in saved.iterdir())
    assert re.search("(thread saved\npool|pool saved\nthread) saved\nscript ends", ended.out)


def test_a_default_number_of_workers_fits_the_shards(resile: Any) -> None:
    ended = resile.run("run", resile.script(), "--json", "--", "--shards", "1", "--epochs", "1")
    assert ended.status == 0, ended.err
    assert ended.json["workers"] == 1


def test_workers_and_later_runs_share_what_they_compile(resile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    script = resile.script(TRAIN + "\nimport os\nprint(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n")
    folders = [resile.run("run", script, "-w", "2").out for _ in range(2)]
    [folder] = {line for out in folders for line in out.splitlines() if "/kernels/torch-" in line}
    assert Path(folder).is_dir()


def test_a_stopped_run_loses_nothing_and_is_resumed_with_its_arguments(resile: Any, undisturbed: str) -> None:
    script = resile.script()
    ended = interrupted(resile, resile.start("run", script, "-w", "2", "--", "--pause", "0.1"))
    resumed = resile.run("run", script, "--resume", "-w", "3", "--json")
    assert resumed.status == 0, resumed.err
    assert resumed.json["params_sha256"] == undisturbed
    assert resumed.json["id"] in ended.last_error
    history = resumed.json["history"]
    assert [item["kind"] for item in history] == [
        "accepted", "allocation", "pausing", "paused", "stopped", "allocation", "completed",
    ]  # fmt: skip
    assert [item["number"] for item in history] == [1, 2, 3, 4, 5, 6, 7]
    assert history[5]["generation"] > history[1]["generation"], "no generation of a run is used twice"
    assert history[5]["iteration"] == history[3]["iteration"] > 0, "nothing is trained twice"
    (run,) = (resile.home / "runs").iterdir()
    logs = sorted(path.name for path in (run / "logs").glob("worker-*.log"))
    assert logs == [f"worker-{number}.log" for number in range(5)], "no worker id of a run is used twice"


def test_a_stopped_run_waits_for_its_checkpoint_however_long_an_iteration_takes(resile: Any) -> None:
    interrupted(resile, resile.start("run", resile.script(), "-w", "2", "--", "--pause", "6"))


STALLED_JOINER = """
import os, signal
try:
    os.close(os.open("has-started", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    signal.pause()
"""


def test_a_run_that_waits_for_the_workers_of_a_step_saves_a_checkpoint_and_stops(resile: Any) -> None:
    process = resile.start("run", resile.script(STALLED_JOINER + TRAIN), "--plan", "0:1,2:2")
    ended = interrupted(resile, process)
    assert ended.last_error.startswith("resile: stopped at iteration 2; ")


@pytest.mark.parametrize("readers", ["0", "1"])
def test_a_signal_to_all_processes_loses_nothing(readers: str, resile: Any, undisturbed: str) -> None:
    """As systemd and a reboot send it, also to the DataLoader workers of the script."""
    script, args = resile.script(), ("--", "--pause", "0.2", "--readers", readers)
    process = resile.start("run", script, "-w", "2", "--json", *args)
    read_until(process.stderr, "first iteration")
    for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        each.send_signal(signal.SIGTERM)
    ended = resile.finish(process)
    assert ended.status == 128 + signal.SIGTERM, ended.err
    stopped_at = ended.json["history"][-1]["iteration"]
    assert stopped_at > 0
    resumed = resile.run("run", script, "-w", "2", "--resume", "--json", *args)
    assert resumed.json["params_sha256"] == undisturbed
    allocations = [item["iteration"] for item in resumed.json["history"] if item["kind"] == "allocation"]
    assert allocations == [0, stopped_at]


def test_a_leaver_reports_iterations_and_not_the_rounds_of_validation(resile: Any) -> None:
    script = resile.script().read_text().replace("return TensorDataset(inputs, targets), None", "return (data, data)")
    assert "(data, data)" in script
    script = script.replace("def datasets():", "data = TensorDataset(inputs, targets)\n\ndef datasets():")
    process = resile.start(
        "run", resile.script(script), "--plan", "0:2,15:1", "--json", "--", "--pause", "0.1", "--epochs", "30"
    )
    read_until(process.stderr, "iteration 15: 2 -> 1 worker")
    process.send_signal(signal.SIGINT)
    history = {item["kind"]: item for item in resile.finish(process).json["history"]}
    assert 15 <= history["pausing"]["iteration"] <= history["paused"]["iteration"] < 25


def test_a_run_goes_on_without_a_killed_worker_and_replaces_it(resile: Any, undisturbed: str) -> None:
    process = resile.start("run", resile.script(), "-w", "3", "--json", "--", "--pause", "0.2")
    read_until(process.stderr, "first iteration")
    os.kill(worker_pids(process.pid)[0], signal.SIGKILL)
    ended = resile.finish(process)
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed
    allocations = [item for item in ended.json["history"] if item["kind"] == "allocation"]
    assert [item["workers"] for item in allocations] == [3, 2, 3]
    assert "was killed by SIGKILL" in allocations[1]["reason"]


def test_when_the_last_worker_is_killed_the_run_resumes_from_its_checkpoint_by_itself(
    resile: Any, undisturbed: str
) -> None:
    script = resile.script()
    process = resile.start("run", script, "-w", "1", "--json", "--", "--every", "3", "--pause", "0.1")
    read_until(process.stderr, "checkpoint saved")
    os.kill(worker_pids(process.pid)[0], signal.SIGKILL)
    ended = resile.finish(process)
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed
    (queued,) = [item for item in ended.json["history"] if item["kind"] == "queued"]
    assert "was killed by SIGKILL" in queued["reason"]
    assert "no worker is left, so it starts again from the checkpoint of iteration" in queued["reason"]
    second = [item for item in ended.json["history"] if item["kind"] == "allocation"][1]
    assert second["iteration"] >= 3


FAILING = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from resile.training import ElasticLoop

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4))
for iteration in ElasticLoop(model, optimizer, data, epochs=20, batch_size=8, checkpoint_every=2):
    waits_until = time.monotonic() + 0.2
    while time.monotonic() < waits_until:
        assert not list(Path(sys.argv[1]).glob("runs/*/checkpoints/*/*/manifest.json")), "on purpose"
        time.sleep(0.001)
    for (inputs,) in iteration.shards():
        iteration.backward(model(inputs).mean())
    if iteration.exchange():
        optimizer.step()
"""


def test_a_failure_right_after_a_checkpoint_says_that_the_run_resumes_from_it(tmp_path: Path) -> None:
    """No round follows in which a worker could report the checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    outcome = run(script, "--workers", "1", home=tmp_path, args=(str(tmp_path),), seconds=60)
    assert outcome.status == 1
    assert "on purpose" in outcome.errors
    assert "resumes from the newest checkpoint" in outcome.errors


@pytest.mark.parametrize("status", [0, 3])
def test_a_script_may_end_its_process_itself_after_training(resile: Any, undisturbed: str, status: int) -> None:
    """As scripts do whose threads do not end; nothing of the result is lost by it."""
    script = resile.script()
    script.write_text(script.read_text() + f"\nimport os\nos._exit({status})\n")
    ended = resile.run("run", script, "-w", "3", "--json")
    if status:
        assert ended.status == 1
        assert "exit status 3, after training was complete" in ended.err
    else:
        assert (ended.status, ended.json["params_sha256"]) == (0, undisturbed)


@pytest.mark.parametrize("chosen", [False, True])
def test_a_script_writes_to_the_output_folder_of_the_run_or_to_one_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, chosen: bool
) -> None:
    script = tmp_path / "train.py"
    note = 'import os, pathlib\npathlib.Path(os.environ["RESILE_OUTPUT_DIR"], "notes.txt").write_text("done")\n'
    script.write_text(TRAIN + note)
    monkeypatch.delenv("RESILE_OUTPUT_DIR", raising=False)
    if chosen:
        monkeypatch.setenv("RESILE_OUTPUT_DIR", str(tmp_path))
    outcome = run(script, "--workers", "1", home=tmp_path / "home")
    assert outcome.status == 0, outcome.errors
    folder = tmp_path if chosen else tmp_path / "home" / "runs" / outcome.result["id"] / "output"
    assert outcome.result["output"] == (None if chosen else str(folder))
    assert (folder / "notes.txt").read_text() == "done"


def test_a_launcher_that_was_killed_is_resumed(resile: Any, undisturbed: str) -> None:
    script = resile.script()
    process = resile.start("run", script, "-w", "2", "--", "--every", "3", "--pause", "0.1")
    read_until(process.stdout, "checkpoint saved")
    process.kill()
    resile.finish(process)
    assert resile.run("run", script, "--resume", "-w", "1", "--json").json["params_sha256"] == undisturbed


def test_a_run_that_is_still_going_is_not_resumed(resile: Any) -> None:
    script = resile.script()
    process = resile.start("run", script, "-w", "1", "--", "--pause", "0.5", "--epochs", "100")
    read_until(process.stdout, "first iteration")
    (run,) = (resile.home / "runs").iterdir()
    ended = resile.run("run", script, f"--resume={run.name}")
    assert ended.status == 2
    assert f"the run {run.name} is still running" in ended.err


def test_only_the_newest_runs_are_kept(resile: Any) -> None:
    script = resile.script()
    for number in range(25):
        old = resile.home / "runs" / f"train-{number:06x}"
        old.mkdir(parents=True)
        (old / "journal").write_text("")
        os.utime(old / "journal", (number, number))
    undeletable = resile.home / "runs" / "train-000000" / "lock"
    undeletable.mkdir()
    ended = resile.run("run", script, "-w", "1", "--", "--epochs", "1")
    assert ended.status == 0, ended.err
    assert f"note: an old run is not deleted: [Errno 21] Is a directory: '{undeletable}'" in ended.out
    names = sorted(path.name for path in (resile.home / "runs").iterdir())
    assert len(names) == 21
    assert "train-000018" in names
    assert "train-000005" not in names


async def test_a_run_is_resized_at_will_and_gives_the_same_bits(resile: Any, undisturbed: str) -> None:
    settings = RunSettings(script=resile.script(), args=("--pause", "0.02"), workers=1, home=resile.home)
    run = LocalRun(settings)
    wishes = [3, 2, 4]
    sizes: list[int] = []

    def watch(event: RunEvent) -> None:
        if isinstance(event, Rescaled):
            sizes.append(event.after)
            if wishes:
                run.resize(wishes.pop(0))

    result = await run.run(watch)
    assert result.outcome.state == "completed"
    assert result.completed is not None
    assert result.completed.params_sha256 == undisturbed
    assert sizes == [1, 3, 2, 4]
    assert not psutil.Process().children(recursive=True)


async def test_the_first_worker_is_heard_also_if_others_start_before_it(
    resile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = HostTemplates.choose
    starts: list[tuple[int, bool]] = []
    has_started = asyncio.Event()

    async def choose_late(self: HostTemplates, config: WorkerConfig, imports: Imports) -> WorkerConfig:
        if config.worker == 0:
            await has_started.wait()
        return await choose(self, config, imports)

    def watch(event: RunEvent) -> None:
        if isinstance(event, Printed) and event.line == "script starts":
            starts.append((event.worker, event.is_lowest_rank))
            has_started.set()

    monkeypatch.setattr(HostTemplates, "choose", choose_late)
    await LocalRun(RunSettings(script=resile.script(), workers=2, home=resile.home)).run(watch)
    assert starts == [(1, False), (0, True)]


async def test_a_cancelled_run_leaves_no_process(resile: Any) -> None:
    settings = RunSettings(script=resile.script(), args=("--pause", "1"), workers=2, home=resile.home)
    run = LocalRun(settings)
    training = asyncio.Event()
    task = asyncio.create_task(run.run(lambda event: training.set() if isinstance(event, Progressed) else None))
    await asyncio.wait([asyncio.create_task(training.wait()), task], return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(UsageError, match="at most 6 workers"):
        run.resize(7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.Process().children(recursive=True)


ON_ITS_FORK_SERVERS_LOG = """
import time
from pathlib import Path
print("y" * 2000, flush=True)
(log,) = Path("HOME").glob("runs/*/logs/fork-server.log")
with log.open("a") as file:
    file.write("x" * 1001)
while log.stat().st_size:
    time.sleep(0.02)
"""


async def test_the_log_of_the_process_that_starts_workers_stays_small(
    resile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(log_files, "CHECK_SECONDS", 0.1)
    script = resile.script(ON_ITS_FORK_SERVERS_LOG.replace("HOME", str(resile.home)) + TRAIN)
    result = await LocalRun(RunSettings(script=script, workers=1, home=resile.home)).run()
    assert result.outcome.state == "completed", result.outcome
    (logs,) = (resile.home / "runs").glob("*/logs")
    assert (logs / "fork-server.log.old").read_text().endswith("x" * 1001)
    assert "y" * 2000 in (logs / "worker-0.log").read_text(), "the limit of what workers print is another one"


def test_a_reader_that_goes_away_does_not_end_training(resile: Any, until: Callable[..., None]) -> None:
    process = resile.start("run", resile.script(), "-w", "1", "-o", "model.pt")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    until(lambda: process.poll() is not None)
    assert sorted(torch.load(resile.folder / "model.pt", weights_only=True)) == [
        "0.bias",
        "0.weight",
        "2.bias",
        "2.weight",
    ]
    assert process.returncode == 0


def test_a_full_disk_under_the_output_does_not_end_training(resile: Any) -> None:
    with open("/dev/full", "w") as full:
        process = resile.start(
            "run", resile.script(), "-w", "1", "-o", "model.pt", output=full.fileno(), PYTHONUNBUFFERED=""
        )
    assert process.wait(timeout=240) == 0
    assert (resile.folder / "model.pt").exists()


def test_a_run_whose_terminal_is_closed_saves_a_checkpoint_and_stops(resile: Any) -> None:
    window, terminal = pty.openpty()
    arguments = ("run", resile.script(), "-w", "1", "--", "--pause", "0.1", "--epochs", "30")
    process = resile.start(*arguments, output=terminal, TERM="xterm")
    os.close(terminal)
    shown = b""
    while b"first iteration" not in shown:
        shown += os.read(window, 65536)
    os.close(window)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=240) == 128 + signal.SIGHUP
    (run,) = (resile.home / "runs").iterdir()
    assert list(run.glob("checkpoints/**/manifest*"))


async def test_each_worker_sees_an_accelerator_of_its_own(resile: Any) -> None:
    """The accelerators are imagined: the workers train on the CPU, and print what they are shown."""
    script = resile.script(
        "import os; print('sees', *map(os.getenv, ('CUDA_VISIBLE_DEVICES', 'CUBLAS_WORKSPACE_CONFIG')))\n" + TRAIN
    )
    settings = RunSettings(script, workers=2, home=resile.home, env={"CUDA_VISIBLE_DEVICES": "all"})
    devices = TorchDevices(accelerators=(("GPU-a", "new"), ("GPU-b", "old"), ("GPU-c", "new")))
    events: list[RunEvent] = []
    result = await LocalRun(settings, devices=devices).run(events.append)
    assert result.outcome.state == "completed", result.outcome
    lines = {(event.worker, event.line) for event in events if isinstance(event, Printed)}
    assert {(0, "sees GPU-a :4096:8"), (1, "sees GPU-c :4096:8")} <= lines
    assert any("accelerators GPU-b are not used" in event.text for event in events if isinstance(event, Noted))


async def test_a_run_that_grows_again_leaves_no_accelerator_idle(resile: Any) -> None:
    """Imagined accelerators again. Worker 2 is started while the process of worker 1 may not have ended."""
    script = resile.script("import os; print('sees', os.getenv('CUDA_VISIBLE_DEVICES'))\n" + TRAIN)
    plan = (PlanStep(0, 2), PlanStep(8, 1), PlanStep(10, 2))
    settings = RunSettings(script, plan=plan, home=resile.home)
    devices = TorchDevices(accelerators=(("GPU-a", "new"), ("GPU-b", "new")))
    events: list[RunEvent] = []
    result = await LocalRun(settings, devices=devices).run(events.append)
    assert result.outcome.state == "completed", result.outcome
    seen = {event.worker: event.line for event in events if isinstance(event, Printed) and "sees" in event.line}
    assert seen == {0: "sees GPU-a", 1: "sees GPU-b", 2: "sees GPU-b"}
