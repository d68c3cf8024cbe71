"""Checkpoints and models on a real S3 server, and what becomes of a run when the server goes away."""

from collections.abc import Callable
from pathlib import Path

import pytest

from resile.chaos.s3_server import S3Server
from resile_learner.checkpoint.store import CheckpointStore
from resile_learner.state.flat import allocate
from resile_shared.storage.objects import StorageError
from resile_testing.fixtures import s3

from .conftest import ITERATIONS_PER_EPOCH, TRAIN, Ended, Resile
from .pools import pool_up
from .s3_proxy import S3Proxy
from .wide import WIDE, Watched, plain_sha

__all__ = ["s3"]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def undisturbed_wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    return plain_sha(tmp_path_factory.mktemp("plain"))


def warnings(ended: Ended) -> list[str]:
    return [item["reason"] for item in ended.json["history"] if item["kind"] == "warning"]


@pytest.mark.nightly
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_on_s3(
    resile: Resile, s3: S3Server, undisturbed: str
) -> None:
    script = resile.script()
    options = ("--workers", 2, "--storage", s3.url + "/runs", "--json")
    process = resile.start("run", script, *options, "--", "--every", 3, "--pause", 0.1)
    Watched(process).until("iteration 6: checkpoint saved")
    process.kill()
    process.communicate()
    ended = resile.run("run", script, "--resume", "--workers", 1, "--json", "-o", resile.folder / "model.safetensors")
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed
    assert ended.json["history"][0]["iteration"] == 0
    assert any(item["kind"] == "allocation" and item["iteration"] >= 6 for item in ended.json["history"])
    assert (resile.folder / "model.safetensors").stat().st_size > 0


def test_a_server_killed_in_the_midst_of_an_upload_costs_a_warning_and_nothing_else(
    resile: Resile, s3: S3Server, undisturbed_wide: Callable[..., str], until: Callable[..., None]
) -> None:
    arguments = ("--width", 1200, "--every", 10, "--epochs", 4)
    process = resile.start(
        "run", resile.script(WIDE), "--workers", 2, "--storage", s3.url + "/runs", "--json", "--", *arguments
    )
    watched = Watched(process)
    watched.until("iteration 10: checkpoint saved")
    before = stored_bytes(s3)
    until(lambda: stored_bytes(s3) > before + (4 << 20))
    s3.kill()
    watched.until("is not stored yet in s3://resile/runs/")
    s3.start()
    watched.until("checkpoint saved")
    ended = watched.end()
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed_wide(*arguments)
    assert "the storage cannot be reached; check that it runs" in warnings(ended)[0]
    store = CheckpointStore(f"{s3.url}/runs/{ended.json['id']}")
    newest = store.complete()[0]
    assert newest.iteration == 4 * ITERATIONS_PER_EPOCH
    for checkpoint in store.complete():
        assert store.load(checkpoint.name, allocate).manifest.checkpoint == checkpoint


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ((400, "ExpiredToken"), "the credentials have expired; renew them"),
        ((400, "Odd"), "the storage refuses the request: status 400 Odd; check the URL and the region"),
    ],
)
def test_a_storage_that_refuses_is_named_once_and_costs_a_run_nothing(
    resile: Resile, s3: S3Server, undisturbed: str, error: tuple[int, str], said: str
) -> None:
    with S3Proxy.before(s3.endpoint) as proxy:
        options = ("--workers", 2, "--storage", s3.url + "/runs", "--json")
        script = (resile.script(), "--", "--every", 10, "--pause", 0.05)
        watched = Watched(resile.start("run", *options, *script, AWS_ENDPOINT_URL=proxy.url))
        watched.until("iteration 10: checkpoint saved")
        proxy.error = error
        watched.until("is not stored yet.*the job is waiting for it")
        proxy.error = None
        ended = watched.end()
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed
    warned = [text for text in warnings(ended) if "is not stored yet" in text]
    assert all(said in text for text in warned), warned
    assert len(warned) <= 6, "one for each checkpoint, model, and way of waiting"
    assert proxy.num_refused > len(warned)


@pytest.mark.nightly
def test_the_end_of_a_run_waits_for_the_storage_of_its_model_and_says_so(
    resile: Resile, s3: S3Server, undisturbed: str
) -> None:
    model = resile.folder / "model.safetensors"
    options = ("--workers", 2, "--storage", s3.url + "/runs", "--json", "-o", model)
    watched = Watched(resile.start("run", resile.script(), *options))
    watched.until("first iteration")
    s3.kill()
    watched.until("the final model is not stored yet in s3://resile/runs/.*the job is waiting for it")
    assert watched.process.poll() is None
    s3.start()
    ended = watched.end()
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed
    assert model.stat().st_size > 0


def test_a_job_of_a_pool_outlasts_its_storage_and_waits_for_it_at_its_end(
    tmp_path: Path, s3: S3Server, undisturbed: str
) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(TRAIN)
    with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 2, "--storage", s3.url + "/pool") as pool:
        job = pool.submit(script, "--", "--pause", 0.1)
        pool.becomes(job, lambda view: view["iteration"] > 2)
        s3.kill()
        warned = pool.becomes(job, lambda view: [item for item in view["history"] if item["kind"] == "warning"])
        assert warned["iteration"] == 30
        assert "the final model is not stored yet in s3://resile/pool/jobs/" in warned["history"][-1]["reason"]
        s3.start()
        assert pool.completed(job)["params_sha256"] == undisturbed
        model = tmp_path / "model.safetensors"
        assert pool.run("model", job, "-o", model).status == 0
        assert model.stat().st_size > 0


def test_a_run_is_refused_at_once_when_its_storage_is_not_there(resile: Resile, s3: S3Server) -> None:
    missing = resile.run("run", resile.script(), "--storage", "s3://another/runs", AWS_ACCESS_KEY_ID="nobody")
    assert missing.status != 0
    assert "check the credentials in this process's environment" in missing.last_error
    s3.kill()
    gone = resile.run("run", resile.script(), "--storage", s3.url + "/runs")
    assert gone.status != 0
    assert "the storage cannot be reached; check that it runs" in gone.last_error


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/x", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_storage_without_credentials_is_explained(url: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError) as caught:
        CheckpointStore(url).complete()
    assert variable in str(caught.value)
    assert "\n" not in str(caught.value)


def stored_bytes(server: S3Server) -> int:
    return sum(file.stat().st_size for file in server.folder.glob("*.dat"))
