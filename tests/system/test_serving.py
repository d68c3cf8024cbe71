"""A class becomes a service on a real pool: it answers while its replicas are killed, come and go."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import resile
from resile.client import find_server
from resile.http_requests import Refused, Server
from resile_shared.messages.jobs import JobState
from resile_testing.waiting import PATIENCE_SECONDS

from .conftest import TRAIN
from .pools import UpPool, pool_up

CLASSIFIER = """
import asyncio, os, time
import resile

class Classifier:
    def __init__(self):
        self.scale = 2.0

    @resile.idempotent
    def predict(self, x):
        return [[self.scale * value for value in row] for row in x]

    async def later(self, seconds=0.0):
        await asyncio.sleep(seconds)
        return "later"

    def tensor(self):
        import torch
        return {"values": torch.ones(2, 2), 3: "three"}

    def pid(self):
        return os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)
        return os.getpid()

    def fail(self):
        raise ValueError("on purpose")

    def nothing_for_json(self):
        return object()

    def _hidden(self):
        return "secret"

class Broken:
    def __init__(self):
        raise OSError("no weights here")
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpPool]:
    with pool_up(tmp_path_factory.mktemp("serving") / "home", "--hosts", 2, "--slots", 2) as pool:
        yield pool


@pytest.fixture(scope="module")
def server(pool: UpPool) -> Server:
    return find_server(home=pool.home)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("script") / "classify.py"
    script.write_text(CLASSIFIER)
    return script


def serve(pool: UpPool, target: str, *options: object) -> str:
    ended = pool.run("serve", target, *options)
    assert ended.status == 0, ended.err
    return ended.out.strip()


@pytest.fixture(scope="module")
def job(pool: UpPool, script: Path) -> str:
    """Two replicas, and three while there are requests."""
    return serve(pool, f"{script}:Classifier", "--min-replicas", 2, "--max-replicas", 3, "--in-flight", 0.001)


def test_methods_are_called_in_python_and_over_http(pool: UpPool, server: Server, job: str) -> None:
    assert job
    service = resile.remote("classify", server=server)
    assert service.predict([[1.0, 2.0]]) == [[2.0, 4.0]], "a call waits for the first replica"
    assert service.predict(x=[[3]]) == [[6.0]]
    assert service.later() == "later"
    assert service.tensor() == {"values": [[1.0, 1.0], [1.0, 1.0]], "3": "three"}
    service.close()
    assert post(server, "classify/predict", b'{"x": [[1]]}') == (200, [[2.0]])
    assert pool.view(job)["settings"] == {
        "service": "class Classifier, 1 at a time, 0.001 requests in flight for each replica"
    }
    assert post(server, f"{job}/predict", b"[[[1]]]") == (200, [[2.0]]), "the id of its job is a name, too"


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "text"),
    [
        ("classify/fail", b"", 500, "failed", "classify.fail: ValueError: on purpose"),
        ("classify/predict", b'{"y": 3}', 422, "invalid", "predict: missing a required argument: 'x'"),
        ("classify/predict", b"[1, 2]", 422, "invalid", "predict: too many positional arguments"),
        ("classify/predict", b"{", 422, "invalid", "the arguments are not JSON"),
        ("classify/predict", b"3", 422, "invalid", "must be a JSON object, which names them, or an array"),
        ("classify/absent", b"", 404, "unknown", "Classifier has no method 'absent'"),
        ("classify/_hidden", b"", 404, "unknown", "Classifier has no method '_hidden'"),
        ("classify/scale", b"", 404, "unknown", "Classifier has no method 'scale'"),
        ("classify/nothing_for_json", b"", 500, "failed", "a result of type object has no form in JSON"),
        ("classify/sleep?seconds=0.3", b"[1]", 504, "late", "classify.sleep: no replica answered in time"),
        ("classify/later?seconds=0", b"", 422, "invalid", "seconds"),
        ("nobody/predict", b"", 404, "unknown", "there is no service nobody: `resile serve` starts one"),
    ],
)
def test_a_call_that_fails_says_why(
    pool: UpPool, server: Server, job: str, path: str, body: bytes, status: int, code: str, text: str
) -> None:
    pool.becomes(job, lambda view: view["workers"] >= 1)
    found, problem = post(server, path, body)
    assert (found, problem["code"]) == (status, code)
    assert text in problem["detail"]


def test_short_calls_do_not_wait_behind_a_long_one_while_other_replicas_are_idle(
    pool: UpPool, server: Server, job: str
) -> None:
    service = resile.remote("classify", server=server)
    long = threading.Thread(target=post, args=(server, "classify/sleep", b"[25]"))
    long.start()
    pool.becomes(job, lambda view: view["workers"] == 3)  # the long call keeps it at its maximum
    begun = time.monotonic()
    for _ in range(30):
        assert service.predict([[1]]) == [[2.0]]
    assert long.is_alive(), f"30 calls took {time.monotonic() - begun} s"
    service.close()
    long.join()


def test_a_class_that_cannot_be_made_fails_the_job_with_its_error(pool: UpPool, script: Path) -> None:
    job = serve(pool, f"{script}:Broken", "--name", "broken")
    view = pool.becomes(job, lambda view: view["state"] == "failed")
    assert "OSError: no weights here (classify.py, line" in view["reason"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("classify.py", "name a file and its class"),
        ("classify.py:Absent", "has no class Absent: its classes are Classifier, Broken"),
        ("absent.py:Classifier", "absent.py: No such file or directory"),
    ],
)
def test_a_class_that_is_not_there_is_refused_before_anything_is_sent(
    pool: UpPool, script: Path, target: str, message: str
) -> None:
    ended = pool.run("serve", str(script.parent / target))
    assert ended.status == 2
    assert message in ended.err


@pytest.mark.long
def test_no_call_that_may_be_repeated_fails_while_replicas_are_killed_and_others_train_and_hosts_drain(
    pool: UpPool, server: Server, job: str, tmp_path: Path
) -> None:
    script = tmp_path / "training" / "train.py"
    script.parent.mkdir()
    script.write_text(TRAIN)
    calls = Calls(server)
    pool.becomes(job, lambda view: view["workers"] == 3)
    for _ in range(10):
        kill_a_replica(server)
        calls.go_on()
    training = pool.submit(script, "--name", "training", "--", "--pause", 0.02, "--epochs", 10_000)
    pool.becomes(job, lambda view: view["workers"] == 2)
    assert pool.run("drain", "host-1").status == 0
    pool.becomes(job, lambda view: not any(slot.startswith("host-1/") for slot in view["slots"]))
    assert pool.run("undrain", "host-1").status == 0
    assert pool.run("stop", training).status == 0
    pool.becomes(job, lambda view: view["workers"] == 3)
    assert pool.run("pause", job).status == 0
    assert pool.run("resume", job).status == 0
    calls.go_on()
    assert calls.end() == []


@pytest.mark.long
@pytest.mark.parametrize("num_peaks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_peak_of_requests_takes_slots_from_training_and_gives_them_back_and_the_bits_stay(
    pool: UpPool, server: Server, script: Path, tmp_path: Path, num_peaks: int
) -> None:
    for running in pool.ask("jobs")["jobs"]:
        if not JobState(running["state"]).is_final:
            pool.run("stop", running["id"])
    train = tmp_path / "training" / "train.py"
    train.parent.mkdir()
    train.write_text(TRAIN)
    options = ("--shards", 12, "--epochs", 60 + 180 * num_peaks)
    undisturbed = pool.run("run", train, "--workers", 1, "--json", "--", *options)
    assert undisturbed.status == 0, undisturbed.err
    training = pool.submit(train, "--name", "training", "--", *options, "--pause", 0.02)
    pool.becomes(training, lambda view: view["workers"] == 4)
    job = serve(pool, f"{script}:Classifier", "--name", "peak", "--max-replicas", 3, "--in-flight", 1)
    pool.becomes(job, lambda view: view["workers"] == 1)
    pool.becomes(training, lambda view: view["workers"] == 3)
    for _ in range(num_peaks):
        peak = Peak(server, num_callers=4)
        pool.becomes(job, lambda view: view["workers"] == 2)
        pool.becomes(training, lambda view: view["workers"] == 2)
        assert peak.end() == []
        pool.becomes(job, lambda view: view["workers"] == 1)
        pool.becomes(training, lambda view: view["workers"] == 3)
    assert pool.completed(training)["params_sha256"] == undisturbed.json["params_sha256"]
    reasons = [item["reason"] for item in pool.view(training)["history"] if item["kind"] == "allocation"]
    assert sum(f"{job} has" in reason for reason in reasons) >= 2 * num_peaks, reasons
    assert pool.run("stop", job).status == 0


class Peak:
    """Callers who each have one request at a time, until `end`."""

    def __init__(self, server: Server, *, num_callers: int) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=self._call) for _ in range(num_callers)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        service = resile.remote("peak", server=self._server)
        while not self._is_over.is_set():
            try:
                service.sleep(0.1)
            except Exception as error:
                self._errors.append(f"{type(error).__name__}: {error}")
        service.close()

    def end(self) -> list[str]:
        """Return the errors."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return self._errors


class Calls:
    """Calls of two threads, one after the other, until `end`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._errors: list[str] = []
        self._num = 0
        self._threads = [threading.Thread(target=self._call) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        service = resile.remote("classify", server=self._server)
        while not self._is_over.is_set():
            try:
                assert service.predict([[1.0]]) == [[2.0]]
                self._num += 1
            except Exception as error:
                self._errors.append(f"{type(error).__name__}: {error}")
        service.close()

    def go_on(self) -> None:
        """Wait for 20 more answers."""
        wanted, deadline = self._num + 20, time.monotonic() + PATIENCE_SECONDS
        while self._num < wanted and not self._errors:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> list[str]:
        """Return the errors."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return self._errors


def kill_a_replica(server: Server) -> None:
    service = resile.remote("classify", server=server)
    while True:
        try:
            os.kill(service.pid(), signal.SIGKILL)
            break
        except Refused as error:  # not to be repeated, and its replica was killed before
            assert error.code == "lost"  # noqa: PT017
    service.close()


def post(server: Server, path: str, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}/v1/services/{path}", data=body, headers={"Authorization": f"Bearer {server.token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
