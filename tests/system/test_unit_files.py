"""The unit files of deploy/systemd/: their commands have the options that they are given, and time to save jobs."""

import configparser
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "systemd").glob("*.service"))


def read(unit: Path, section: str = "Service") -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return parser[section]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_its_command_knows_the_options(unit: Path) -> None:
    program, command, *options = shlex.split(read(unit)["ExecStart"])
    assert program.endswith("/resile")
    known = subprocess.run(
        [sys.executable, "-m", "resile", command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert {option for option in options if option.startswith("--")} <= set(re.findall(r"--[a-z-]+", known))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_has_time_to_save_jobs(unit: Path) -> None:
    service = read(unit)
    options = shlex.split(service["ExecStart"])
    assert int(service["TimeoutStopSec"]) > float(options[options.index("--grace-seconds") + 1])
    assert service["KillMode"] == "mixed", "the others are ended by the command"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_starts_when_the_clock_is_set(unit: Path) -> None:
    """A service follows a clock that is set later only slowly."""
    assert "time-sync.target" in read(unit, "Unit")["After"].split()


def test_there_is_one_for_a_pool_and_one_for_a_host() -> None:
    assert [unit.stem for unit in UNITS] == ["resile-host", "resile"]
