"""Nothing that others wrote reaches a terminal but as text."""

import json

import pytest
from rich.console import Console

from resile.cli import main
from resile.cli.top import view
from resile_shared.messages.jobs import JobState
from resile_shared.text import is_line, printable

from .api_server import HOST, ApiServer, job_view

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08fine\x00\nforged line\u202etxt.exe\u2028 [red]x[/red]"
SPELLED = r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08fine\x00\nforged line\u202etxt.exe\u2028 [red]x[/red]"


@pytest.fixture
def hostile(api_server: ApiServer) -> ApiServer:
    evil = {"name": EVIL, "reason": EVIL, "script": EVIL, "args": (EVIL,), "group": EVIL, "warnings": (EVIL,)}
    job = job_view("digits-1", **evil, details=f"Traceback\n{EVIL[:20]}", state=JobState.FAILED)
    items = [item.model_copy(update={"reason": EVIL}) for item in job.history]
    api_server.jobs["digits-1"] = job.model_copy(update={"history": tuple(items)})
    api_server.lines = [
        line.model_copy(update={"text": f"{number} {EVIL}"}) for number, line in enumerate(api_server.lines)
    ]
    return api_server


def is_harmless(text: str) -> bool:
    return all(is_line(line) for line in text.split("\n"))


@pytest.mark.parametrize(
    "command", [["jobs"], ["job", "digits-1"], ["logs", "digits-1"], ["wait", "digits-1"], ["top"]]
)
@pytest.mark.usefixtures("hostile")
def test_what_others_wrote_is_spelled_out(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    main(command)
    shown = capfd.readouterr()
    assert is_harmless(shown.out)
    assert is_harmless(shown.err)
    assert r"\x1b]0;owned" in shown.out + shown.err
    assert "\nforged line" not in shown.out + shown.err


@pytest.mark.usefixtures("hostile")
def test_a_refusal_is_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["job", EVIL])
    assert is_harmless(capsys.readouterr().err)


@pytest.mark.usefixtures("hostile")
def test_programs_get_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    main(["job", "digits-1", "--json"])
    assert json.loads(capsys.readouterr().out)["reason"] == EVIL


def test_colours_are_dropped_and_everything_readable_stays() -> None:
    assert printable("\x1b[1;31mred\x1b[0m\tüñí 日本語 🙂") == "red\tüñí 日本語 🙂"
    assert printable(EVIL) == SPELLED


def test_the_live_view_shows_no_markup_of_others() -> None:
    console = Console(width=400, force_terminal=True, color_system=None)
    with console.capture() as shown:
        console.print(view(([job_view("digits-1", reason=EVIL)], [HOST]), url="http://x"))
    assert SPELLED in shown.get()


@pytest.mark.parametrize("options", [["--name", EVIL], ["--group", "zone=\x1b[2J"]])
@pytest.mark.usefixtures("api_server")
def test_names_and_labels_with_control_characters_are_refused(
    options: list[str], tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"{tmp_path}/train.py"
    with open(script, "w") as file:
        file.write("print()")
    assert main(["submit", script, *options]) == 2
    assert "must have no control characters" in capsys.readouterr().err
