"""Commands that run until they are stopped: what a signal does, however early it comes."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from resile import cli
from resile.cli.stopping import StopMessages, until_stopped

MESSAGES = StopMessages(first="stopping", second="stopping at once", final="stopped")


class Nothing:
    """A supervisor of no processes."""

    def pids(self) -> set[int]:
        return set()

    async def kill(self) -> None:
        pass


def run(*, before: Callable[[], None], during: Callable[[], None], said: list[str]) -> int:
    """Run a command that calls ``before`` before it can be stopped, and ``during`` while it works."""

    async def work() -> None:
        said.append("working")
        during()
        await asyncio.Event().wait()

    async def command() -> int:
        before()
        return await until_stopped(Nothing(), work(), log=said.append, messages=MESSAGES)

    return asyncio.run(command())


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_before_the_command_can_be_stopped_starts_nothing() -> None:
    """Work that has begun would go on when the command has ended, and keep its process alive."""
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(before=interrupt, during=lambda: None, said=said)
    assert said == []


def test_an_interrupt_ends_the_work() -> None:
    said: list[str] = []
    assert run(before=lambda: None, during=interrupt, said=said) == 0
    assert said == ["working", "stopping", "stopped"]


def test_an_interrupt_of_any_command_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal:
        def read(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Terminal())
    assert cli.main(["host", "--join", "http://127.0.0.1:1", "--token-file", "-"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "resile: interrupted\n"


def test_an_interrupted_import_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What an import does may turn the interrupt into another error."""

    def fails(_: list[str]) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("a class is half made") from error

    monkeypatch.setattr(cli, "_main", fails)
    assert cli.main(["up"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "resile: interrupted\n"
