"""The commands that talk to a pool: what they send, what they print, and how they fail."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from resile import http_requests
from resile.cli import main, watch
from resile_shared.messages.jobs import JobState
from resile_shared.policies import PolicyName
from resile_testing.waiting import block_until

from .api_server import TOKEN, ApiServer, job_view


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    return folder / "train.py"


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str], *, status: int = 1) -> str:
    """Run a command that fails; return its one line."""
    assert main(arguments) == status
    line = capsys.readouterr().err
    assert line.startswith("resile: ")
    assert line.count("\n") == 1
    return line


def test_a_submitted_script_is_packed_and_its_wishes_are_sent(
    api_server: ApiServer, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hush")
    options = ["--max-workers", "3", "--priority", "7000", "--env", "A=b", "--env", "SECRET", "--group", "gpu=h200"]
    options += ["--sizes", "1,3", "--placement", "spread", "--deadline", "2h"]
    assert main(["submit", str(script), *options, "--", "--lr", "0.1"]) == 0
    assert capsys.readouterr().out == "new-1\n"
    with tarfile.open(fileobj=io.BytesIO(api_server.packages[0])) as archive:
        assert archive.getnames() == ["train.py"]
    (verb, spec) = api_server.asked[0]
    assert (verb, spec.name, spec.script, spec.args) == ("submit", "train", "train.py", ("--lr", "0.1"))
    assert (spec.max_workers, spec.priority, spec.env, spec.group) == (
        3,
        7000,
        {"A": "b", "SECRET": "hush"},
        "gpu=h200",
    )
    assert (spec.sizes, spec.placement) == ((1, 3), "spread")
    assert timedelta(minutes=110) < spec.deadline - datetime.now(UTC) <= timedelta(hours=2)
    assert spec.package == "packages/abc.tar.gz"


def test_a_request_whose_answer_is_lost_is_sent_again_with_the_same_key(
    api_server: ApiServer, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.num_lost_answers = 1
    assert main(["submit", str(script), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "new-1"}
    assert (len(api_server.keys), len(set(api_server.keys))) == (3, 2)


def test_a_dry_run_lists_what_would_be_sent_and_sends_nothing(
    api_server: ApiServer, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script.parent / "words.txt").write_text("a" * 1234)
    (script.parent / "server.key").touch()
    assert main(["submit", str(script), "--dry-run"]) == 0
    *files, total, not_sent = capsys.readouterr().out.splitlines()
    assert files == ["   15  train.py", "1,234  words.txt"]
    assert total.startswith("2 files with 1249 bytes would be uploaded as a package of ")
    assert total.endswith("; the script is train.py")
    assert not_sent == "not sent: server.key (may be a secret)"
    assert main(["submit", str(script), "--dry-run", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["files"] == [{"name": "train.py", "bytes": 15}, {"name": "words.txt", "bytes": 1234}]
    assert (listing["script"], listing["left_out"]) == ("train.py", ["server.key (may be a secret)"])
    assert listing["upload"] > 0
    assert (api_server.packages, api_server.asked) == ([], [])


@pytest.mark.usefixtures("api_server")
@pytest.mark.parametrize("is_script", [True, False])
def test_what_is_not_sent_is_named_beside_the_id(
    script: Path, capsys: pytest.CaptureFixture[str], *, is_script: bool
) -> None:
    (script.parent / ".env").write_text("TOKEN=1")
    (script.parent / "layers").symlink_to("/usr/lib")
    assert main(["submit", str(script if is_script else script.parent)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "new-1\n"
    assert captured.err.startswith("not sent: .env (hidden), layers/ (link out of the folder, to /usr/lib): jobs get ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--max-workers", "0"], "--max-workers must be an integer from 1 to 10000"),
        (["--min-workers", "4", "--max-workers", "2"], "--min-workers 4 is above --max-workers 2: lower one"),
        (["--sizes", "1,two"], "--sizes: 1,two is not a list of whole numbers: use a form such as 1,2,4,8"),
        (["--deadline", "soon"], "--deadline: soon is not a time: use a form such as 90m, 2h, 3d or 2026-01-02T18:00"),
        (["--deadline", "2001-01-01"], "--deadline: 2001-01-01 00:00 has passed: give a later time"),
        (["--sizes", "4,2"], "--sizes must be in increasing order without duplicates, as in 1,2,4,8"),
        (["--sizes", "4,8", "--max-workers", "2"], "no size of 4, 8 is from --min-workers 1 to --max-workers 2"),
        (["--placement", "near"], "--placement must be 'pack' or 'spread'"),
        (["--group", "gpu"], "'gpu' is not a label: give name and value, as in gpu=h200,zone=a"),
        (["--group", "gpu=h200,=a"], "'=a' is not a label"),
        (["--tenant", "a b"], "--tenant must match"),
        (["--env", "=X"], "--env '=X': must have the form NAME=VALUE, or NAME"),
        (["--gang", "0"], "--gang must be a number of workers from 1 to 10000"),
        (["--gang", "4", "--sizes", "4"], "--gang 4: it always has 4 workers: leave out --min-workers, --max-workers"),
        (["--with", "-r x"], "--with: '-r x' is an option of pip"),
        (["--mount", "/a" * 600], "--mount"),
        (["--compat", "other"], "--compat: there is no interface other: use ibm-edt"),
        (["--env", "NOT_SET"], "--env NOT_SET: there is no variable NOT_SET in this environment"),
    ],
)
def test_wishes_that_cannot_be_are_refused_before_anything_is_sent(
    options: list[str], answer: str, api_server: ApiServer, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in failure(["submit", str(script), *options], capsys, status=2)
    assert not api_server.packages


@pytest.mark.usefixtures("api_server")
def test_the_steps_of_a_change_leave_out_messages_and_what_happened_to_other_jobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trace", "digits-1", "last"]) == 0
    out = capsys.readouterr().out
    assert "resile.suspicion" not in out
    assert "start worker" not in out
    assert "Z;" not in out, "times are those of the clock here"
    assert main(["trace", "digits-1", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace"]["spans"][2]["name"] == "recover"
    assert "no change" in failure(["trace", "digits-1", "77"], capsys, status=2)


@pytest.mark.usefixtures("api_server")
def test_a_job_as_json_has_the_fields_that_programs_count_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "digits-1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    wanted = (
        "id name state priority min_workers max_workers workers generation iteration iterations_total epoch "
        "samples_seen loss params_sha256 history"
    )
    assert set(wanted.split()) <= set(document)
    assert document["workers"] == 2
    assert document["params_sha256"] is None
    assert document["history"][0] == {
        "number": 1,
        "time": "2026-01-02T03:04:05.678Z",
        "kind": "allocation",
        "generation": 1,
        "workers": 2,
        "slots": ["host-1/0", "host-1/1"],
        "iteration": 0,
        "reason": "start",
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["jobs"], ["digits-1", "running", "50/120", "0.25", "7 s"]),
        (["job", "digits-1"], ["train.py --lr 0.1", "2 (limits 1 to 4)", "host-1/0 host-1/1", "start"]),
        (["hosts"], ["host-1", "up", "zone=a"]),
        (["ledger", "digits-1"], ["EPOCH", "96"]),
        (["trace", "digits-1"], ["recovery", "5 -> 3", "130.0 ms", "kept", "host-2 was lost at"]),
        (["trace", "digits-1", "2"], ["worker suspected worker 0", "  recover worker 0", "2 more steps"]),
        (["trace", "digits-1", "abab", "--all"], ["handle resile.suspicion.{job}", "start worker worker 3"]),
        (["logs", "digits-1", "--tail", "2"], ["[worker 0] line 9\n[worker 0] line 10\n"]),
        (["top"], ["1 host, 2 slots, 1 busy", "digits-1", "running"]),
        (["priority", "digits-1", "7000"], ["digits-1 has priority 7000"]),
        (["stop", "digits-1"], ["digits-1 is stopping"]),
        (["pause", "digits-1"], ["digits-1 is pausing"]),
        (["resume", "digits-1"], ["digits-1 is resuming"]),
        (["drain", "host-1", "--deadline", "5"], ["host-1 is draining"]),
        (["undrain", "host-1"], ["host-1 is not drained"]),
    ],
)
@pytest.mark.usefixtures("api_server")
def test_commands_tell_people_what_they_want_to_know(
    arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for text in told:
        assert text in out
    assert main([*arguments, "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_changes_are_sent_as_the_api_wants_them(api_server: ApiServer) -> None:
    assert main(["priority", "digits-1", "7000"]) == 0
    assert main(["stop", "digits-1", "--reason", "enough"]) == 0
    assert main(["drain", "host-1", "--deadline", "5"]) == 0
    assert main(["undrain", "host-1"]) == 0
    assert api_server.asked == [
        ("/v1/jobs/digits-1/priority", {"priority": 7000}),
        ("/v1/jobs/digits-1/stop", {"reason": "enough"}),
        ("/v1/hosts/host-1/drain", {"deadline_seconds": 5.0}),
        ("/v1/hosts/host-1/undrain", {}),
    ]


def test_a_job_may_be_called_by_its_name_if_no_other_has_it(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "digits"]) == 0
    assert api_server.asked[0][0] == "/v1/jobs/digits-1/stop"
    api_server.jobs["digits-2"] = job_view("digits-2")
    assert "2 jobs are named digits" in failure(["stop", "digits"], capsys, status=2)
    assert "or digits@latest" in failure(["stop", "digits"], capsys, status=2)
    assert main(["stop", "digits@latest"]) == 0
    assert api_server.asked[-1][0] == "/v1/jobs/digits-2/stop"
    assert "there is no job other@latest" in failure(["stop", "other@latest"], capsys, status=2)
    assert "there is no job other: `resile jobs`" in failure(["stop", "other"], capsys, status=2)


def test_logs_say_when_older_lines_are_not_shown(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["logs", "digits-1"]) == 0
    captured = capsys.readouterr()
    assert (len(captured.out.splitlines()), captured.err) == (10, "")
    monkeypatch.setattr(watch, "DEFAULT_LINES", 4)
    assert main(["logs", "digits-1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"[worker 0] line {number}" for number in range(7, 11)]
    assert captured.err == "older lines are not shown: these are the newest 4; --tail N shows up to 10000\n"
    assert main(["logs", "digits-1", "--tail", "4"]) == 0
    assert capsys.readouterr().err == "", "what was asked for"
    assert main(["logs", "digits-1", "--tail", "20000"]) == 2


@pytest.mark.parametrize("name", ["digits", "digits@latest"])
def test_a_command_that_reads_takes_the_newest_job_of_a_name_and_one_that_fetches_the_newest_model(
    name: str, api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.COMPLETED)
    api_server.jobs["digits-2"] = job_view("digits-2")
    assert main(["job", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "digits-2"
    for command in ("logs", "ledger", "trace"):
        assert main([command, name]) == 0
    assert main(["model", name, "-o", str(tmp_path / "model")]) == 0, "the newest job has none yet"
    assert main(["models", name]) == 0
    assert "digits-1" in capsys.readouterr().out


def test_a_command_with_a_key_of_the_user_sends_it(
    api_server: ApiServer, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [["submit", str(script)], ["stop", "digits"], ["drain", "host-1"], ["undrain", "host-1"]]
    for command in commands:
        api_server.keys.clear()
        assert main([*command, "--idempotency-key", "night-1"]) == 0
        assert set(api_server.keys) == {"night-1"}
    error = failure(["stop", "digits", "--idempotency-key", "a b"], capsys, status=2)
    assert "an idempotency key must be 1 to 200 visible ASCII characters" in error


def test_an_error_that_asks_for_the_same_key_names_it(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_requests, "_RETRY_SECONDS", 0.0)
    api_server.is_unavailable = True
    error = failure(["stop", "digits-1"], capsys)
    assert error.rstrip().endswith(f"with the same Idempotency-Key (--idempotency-key {api_server.keys[-1]})")
    assert main(["stop", "--help"]) == 0
    assert "--idempotency-key" in capsys.readouterr().out


def test_followed_logs_survive_broken_connections_and_end_with_the_job(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.COMPLETED)
    assert main(["logs", "digits-1", "-f"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"[worker 0] line {number}" for number in range(1, 11)]


def test_followed_events_end_with_the_job_when_all_of_them_are_there(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.COMPLETED)
    api_server.events = api_server.events[:4]
    monkeypatch.setattr("resile.http_requests._PAUSE_SECONDS", 1.5)  # however long the connection is broken
    assert main(["events", "digits-1", "-f"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(".")[2] for line in lines] == [f"event{number}" for number in range(1, 5)]


def test_patience_with_a_connection_begins_when_it_breaks_however_quiet_it_was(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resile.http_requests.PATIENCE_SECONDS", 0)
    test_followed_logs_survive_broken_connections_and_end_with_the_job(api_server, capsys)


def test_a_followed_line_may_have_any_length(api_server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.COMPLETED)
    long = "\x07" * 100_000  # each is six bytes of JSON
    api_server.lines = [line.model_copy(update={"text": long}) for line in api_server.lines[:2]]
    assert main(["logs", "digits-1", "-f"]) == 0
    assert len(capsys.readouterr().out) > 2 * len(long)


@pytest.mark.parametrize(("state", "status"), [(JobState.COMPLETED, 0), (JobState.FAILED, 1), (JobState.STOPPED, 1)])
def test_waiting_ends_with_the_job_and_tells_how_it_went(
    state: JobState, status: int, api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=state, reason="because", workers=0)
    assert main(["wait", "digits-1"]) == status
    err = capsys.readouterr().err
    assert f"digits-1  50/120  {state.value}" in err
    assert (f"resile: digits-1 {state.value}: because" in err) == (status == 1)


def test_waiting_ends_although_jobs_are_deleted_meanwhile(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resile.cli.waiting.POLL_SECONDS", 0)
    for job in ("one-1", "two-2", "three-3"):
        api_server.jobs[job] = job_view(job)
    steps: list[Callable[[], object]] = [
        lambda: api_server.jobs.update({"one-1": job_view("one-1", state=JobState.COMPLETED)}),
        lambda: api_server.jobs.pop("one-1"),
        lambda: api_server.jobs.update({"two-2": job_view("two-2", state=JobState.COMPLETED)}),
    ]
    api_server.before = [lambda: None] * 3 + steps  # each name is looked up, then they are looked at
    assert main(["wait", "one-1", "two-2", "one-1", "--json"]) == 0
    assert [job["id"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["one-1", "two-2"]
    api_server.before = [lambda: None, lambda: api_server.jobs.pop("three-3")]
    assert "there is no job three-3" in failure(["wait", "three-3"], capsys)


def test_a_model_is_written_to_its_file_or_not_at_all(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.safetensors"
    assert "wait for its end" in failure(["model", "digits-1", "-o", str(file)], capsys)
    assert not list(tmp_path.glob("*model*"))
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.COMPLETED)
    assert main(["model", "digits-1", "-o", str(file)]) == 0
    assert file.read_bytes() == b"modelsafetensors"
    assert main(["model", "digits-1", "-o", str(file.with_suffix(".pt"))]) == 0
    assert file.with_suffix(".pt").read_bytes() == b"modelpt"
    assert "does not exist: create it" in failure(
        ["model", "digits-1", "-o", str(tmp_path / "no" / "m")], capsys, status=2
    )


def test_a_model_of_a_job_that_failed_later_is_fetched_and_the_command_says_that_it_failed(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.FAILED, reason="exit status 3")
    assert main(["model", "digits-1", "-o", str(tmp_path / "m")]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"the model is {tmp_path / 'm'}\n"
    assert captured.err == "digits-1 failed although its training had ended: exit status 3\n"
    assert main(["models"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["digits-1", "digits", "failed"]


@pytest.mark.usefixtures("api_server")
def test_output_is_written_to_a_folder_although_the_one_above_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, _: Path(path) != tmp_path)
    folder = tmp_path / "results"
    assert f"the folder {tmp_path} is not writable" in failure(
        ["output", "digits", "-o", str(folder)], capsys, status=2
    )
    folder.mkdir()
    assert main(["output", "digits", "-o", str(folder)]) == 0


def test_what_the_pool_refuses_is_said_in_its_words(api_server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.COMPLETED)
    assert failure(["stop", "digits-1"], capsys) == ("resile: job digits-1 is completed and cannot change any more\n")


def test_with_json_a_failure_is_an_object_too(api_server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    api_server.jobs.clear()
    assert main(["job", "digits-1", "--json"]) == 2
    assert "there is no job digits-1" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("submit no-such-file", "there is no script or folder no-such-file"),
        ("model digits-1 -o /no/file", "the folder /no does not exist"),
        ("output digits-1 -o /no/folder", "the folder /no does not exist"),
        ("priority digits-1 high", "Invalid value for 'N'"),
        ("jobs --no-such-option", "No such option: --no-such-option"),
        ("chaos --no-such-option", "No such option: --no-such-option"),
        ("simulate no-such-trace", "no trace no-such-trace"),
        ("run no-such-script.py", "no-such-script.py"),
    ],
)
@pytest.mark.usefixtures("api_server")
def test_with_json_every_failure_is_one_object(command: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--json"]) == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert error in document["error"]
    assert document["error"] in captured.err
    assert document.get("state") == ("failed" if command.startswith("run") else None)


@pytest.mark.usefixtures("api_server")
def test_json_for_the_script_is_none_for_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "no-such-file", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("api_server")
def test_a_token_is_read_without_the_end_of_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESILE_TOKEN", f"{TOKEN}\n")
    assert main(["jobs"]) == 0
    for token in ("two\nlines", "t\u00f6ken"):
        monkeypatch.setenv("RESILE_TOKEN", token)
        assert "characters that no token has: check RESILE_TOKEN" in failure(["jobs"], capsys, status=2)


@pytest.mark.usefixtures("api_server")
def test_a_wrong_token_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RESILE_TOKEN", "another")
    assert "rejects this token: check RESILE_TOKEN" in failure(["jobs"], capsys)
    monkeypatch.delenv("RESILE_TOKEN")
    assert "requires a token: set RESILE_TOKEN" in failure(["jobs"], capsys, status=2)


def test_without_a_pool_the_way_to_one_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = failure(["jobs", "--home", str(tmp_path)], capsys)
    assert f"no pool is running in {tmp_path}: start one with `resile up --home {tmp_path}`" in line


def test_a_pool_that_was_killed_is_told_from_one_that_never_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; from pathlib import Path; from resile.pool.home import PoolHome"
    code += "; PoolHome(Path(sys.argv[1])).announce('http://127.0.0.1:1', storage='')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    line = failure(["jobs", "--home", str(tmp_path)], capsys)
    assert "does not answer (Connection refused)" in line
    assert f"it was killed: restart it with `resile up --home {tmp_path}`" in line


@pytest.mark.parametrize(
    ("server", "answer"),
    [("pool:80", "is not a URL: it must start"), ("http://127.0.0.1:1", "does not answer")],
)
def test_a_wrong_address_is_told(
    server: str, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESILE_TOKEN", "x")
    assert main(["jobs", "--server", server]) != 0
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("server", ["http://", "http://[", "http://127.0.0.1:99999", "http://.."])
@pytest.mark.parametrize("command", ["jobs", "events -f"])
def test_an_address_that_cannot_be_is_told(
    server: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESILE_TOKEN", "x")
    line = failure([*command.split(), "--server", server], capsys)
    assert "does not answer like a pool of this version: check the address" in line


@pytest.mark.parametrize("command", ["jobs", "events -f"])
def test_what_answers_and_is_no_pool_is_told(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESILE_TOKEN", "x")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(1000)

        greeting = threading.Thread(target=greet)
        greeting.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "does not answer like a pool" in failure([*command.split(), "--server", url], capsys)
        greeting.join()


def test_the_browser_that_page_opens_outlives_the_command(api_server: ApiServer, tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f"#!/bin/sh\necho $$ > {opened}.new\nmv {opened}.new {opened}\nexec sleep 60\n")
    browser.chmod(0o700)
    command = [sys.executable, "-m", "resile", "page", "--open"]
    subprocess.run(command, env={**os.environ, "BROWSER": f"{browser} %s &"}, stdout=subprocess.DEVNULL, check=True)
    block_until(opened.exists)
    os.kill(int(opened.read_text()), signal.SIGKILL)


def test_the_policy_is_shown_and_changed(api_server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy"]) == 0
    assert capsys.readouterr().out.splitlines() == ["policy      fifo", "preemption  off"]
    assert main(["policy", "priority", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"policy": "fifo", "preemption": False}
    assert main(["policy", "--preemption"]) == 0
    assert api_server.asked == [
        ("/v1/policy", {"policy": "priority", "preemption": None}),
        ("/v1/policy", {"policy": None, "preemption": True}),
    ]
    line = failure(["policy", "chaos"], capsys, status=2)
    assert all(repr(name.value) in line for name in PolicyName)


def test_tenants_are_listed_changed_and_deleted(api_server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tenant", "list"]) == 0
    table = ["TENANT  WEIGHT  QUOTA  CAP  JOBS  WORKERS", "vision  2       16     -    1     8"]
    assert capsys.readouterr().out.splitlines() == table
    assert main(["tenant", "set", "vision", "--weight", "2", "--json"]) == 0
    vision = {"id": "vision", "weight": 2, "quota": 16, "cap": 0, "is_configured": True, "jobs": 1, "workers": 8}
    assert json.loads(capsys.readouterr().out) == {"tenants": [vision]}
    assert main(["tenant", "set", "vision", "--quota", "16"]) == 0
    assert main(["tenant", "set", "vision", "--cap", "24"]) == 0
    assert main(["tenant", "delete", "vision"]) == 0
    assert api_server.asked == [
        ("/v1/tenants/vision", {"weight": 2, "quota": None, "cap": None}),
        ("/v1/tenants/vision", {"weight": None, "quota": 16, "cap": None}),
        ("/v1/tenants/vision", {"weight": None, "quota": None, "cap": 24}),
        ("/v1/tenants/vision", "DELETE"),
    ]


def test_usage_is_shown_by_tenant_and_job(api_server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "TENANT  JOB           NAME    SLOT-HOURS  SLOTS",
        "vision                        4.00        4",
        "        job-1         digits  1.50        4",
        "        removed jobs          2.50",
    ]
    assert main(["usage", "--tenant", "vision", "--since", "7d", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tenants"][0]["slot_hours"] == 4.0
    assert api_server.asked == [("/v1/usage", {}), ("/v1/usage", {"tenant": "vision", "hours": "168"})]
    for since in ("8d", "0h", "169h", "yesterday", "-1h", "24"):
        assert "must be from 1h to 168h, or from 1d to 7d" in failure(["usage", f"--since={since}"], capsys, status=2)
    assert "there is no tenant nobody" in failure(["usage", "--tenant", "nobody"], capsys, status=2)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["vision"], "nothing to change for tenant vision: use --weight, --quota or --cap"),
        (["vision", "--weight", "0"], "--weight"),
        (["vision", "--quota", "-1"], "--quota"),
        (["vision", "--quota", "many"], "--quota"),
        (["--quota", "1"], "NAME"),
    ],
)
def test_a_tenant_that_cannot_be_is_refused(
    options: list[str], answer: str, api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in failure(["tenant", "set", *options], capsys, status=2)
    assert api_server.asked == []


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--hosts", "0"], "--hosts"),
        (["--policy", "chaos"], "--policy"),
        (["--listen", "192.0.2.1"], "cannot listen on --listen 192.0.2.1 --port 0"),
        (["--home", "/proc/home"], "the home folder /proc/home cannot be used"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_at_once(
    options: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in failure(["up", "--home", str(tmp_path), *options], capsys, status=2)


def test_models_are_listed_and_compared_side_by_side(api_server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert capsys.readouterr().out == "there are no models yet: no training has ended\n"
    done = {"state": JobState.COMPLETED, "validation": {"accuracy": 0.98}}
    api_server.jobs["one-2"] = job_view("one-2", name="one", params_sha256="12" * 32, **done)
    api_server.jobs["two-3"] = job_view("two-3", name="two", params_sha256="34" * 32, loss=0.5, **done)
    assert main(["models"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["one-2", "one", "completed"]
    assert main(["models", "one", "two-3"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["loss", "0.25", "0.5"] in rows
    assert ["validation", "accuracy", "0.98", "0.98"] in rows
    assert ["sha256", "12" * 6, "34" * 6] in rows
    assert "has no model" in failure(["models", "digits-1"], capsys, status=2)
