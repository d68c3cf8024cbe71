"""Where CI is set, a skipped test fails the run: nothing is left out silently. No test hangs: see `pyproject.toml`."""

import gc
import os
import signal
import sys

import pytest
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


class NothingSkipped:
    """Notes what was skipped, and has the last word on the exit status."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.skipped:
            terminalreporter.write_line(f"SKIPPED, which CI does not allow: {test}", red=True)


class StillRunning:
    """Names the tests that run when the whole is interrupted: one of them hangs."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests.pop(nodeid, None)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.tests:
            terminalreporter.write_line(f"STILL RUNNING when this was interrupted: {test}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    # Children would inherit what a shell's background job, or `nohup`, ignores.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(StillRunning())
    if os.environ.get("CI"):
        config.pluginmanager.register(NothingSkipped())


def pytest_collection_finish() -> None:
    """Take what is imported out of the garbage collector, as fork servers do: it and watches search the rest alone."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Forget training that tests left unfinished: it would be completed when this process ends, as a script's is."""
    if learner := sys.modules.get("resile_learner.session"):
        learner._joined_solo.clear()
