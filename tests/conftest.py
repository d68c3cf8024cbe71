"""Where CI is set, a skipped test fails the run: nothing is left out silently."""

import gc
import os
import signal

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


def pytest_configure(config: pytest.Config) -> None:
    # Children would inherit what a shell's background job, or `nohup`, ignores.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if os.environ.get("CI"):
        config.pluginmanager.register(NothingSkipped())


def pytest_collection_finish() -> None:
    """Take what is imported out of the garbage collector, as fork servers do: it and watches search the rest alone."""
    gc.collect()
    gc.freeze()
