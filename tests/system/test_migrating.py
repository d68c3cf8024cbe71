"""The tables of docs/migrating.md, applied line by line to whole scripts, make scripts that train elastically."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .running import SCRIPTS, plain, run

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
EDT_MODULES = "sdk/resile/integrations/ibm_edt/modules"
SECTION = re.compile(r"^## (.+?)\n\n\| original .*?\n\|---\|---\|\n(.*?)\n\nScript: `(.+?)`", re.DOTALL | re.MULTILINE)
TABLES = {script: rows.splitlines() for _, rows, script in SECTION.findall((ROOT / "docs/migrating.md").read_text())}
IN_CI = ("ddp", "elastic", "plain")
"""The scripts that are not nightly: examples/ has one of each of the other kinds."""


def cells(row: str) -> tuple[list[str], list[str]]:
    """The lines of the original, and those that take their place."""
    left, right = re.findall(r"\|((?: ?`[^`]*`(?:<br>)?)*) ?(?=\|)", row)
    return re.findall(r"`([^`]*)`", left), re.findall(r"`([^`]*)`", right)


def replaced(lines: list[str], old: list[str], new: list[str]) -> list[str]:
    """Replace ``old`` wherever it is, at whatever indentation."""
    result: list[str] = []
    found = 0
    while lines:
        indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        if lines[: len(old)] == [indent + line for line in old]:
            found += 1
            result += [indent + line for line in new]
            lines = lines[len(old) :]
        else:
            result.append(lines.pop(0))
    assert found, f"the script has no {old}"
    return result


def migrated(script: str) -> str:
    lines = (ROOT / script).read_text().splitlines()
    for row in TABLES[script]:
        lines = replaced(lines, *cells(row))
    return "\n".join(lines) + "\n"


def test_every_script_has_its_table() -> None:
    assert {Path(script).name for script in TABLES} == {file.name for file in (SCRIPTS / "migrating").glob("*.py")}


@pytest.mark.nightly
@pytest.mark.parametrize("script", sorted(TABLES))
def test_a_script_runs_before_it_is_migrated(script: str, tmp_path: Path) -> None:
    uses_torchrun = "torch.distributed" in (ROOT / script).read_text()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if uses_torchrun else []
    env = {**os.environ, "PYTHONPATH": f"{SCRIPTS / 'stand_ins'}{os.pathsep}{ROOT / EDT_MODULES}"}
    subprocess.run([sys.executable, *launcher, ROOT / script], cwd=tmp_path, env=env, timeout=300, check=True)


@pytest.mark.parametrize(
    "script",
    [pytest.param(one, marks=[] if Path(one).stem in IN_CI else [pytest.mark.nightly]) for one in sorted(TABLES)],
)
def test_a_migrated_script_has_the_same_bits_on_any_number_of_workers(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(migrated(script))
    outcome = run(file, "--plan", "0:1,4:3,9:2", home=tmp_path / "home", seconds=300)
    assert outcome.sha == plain(file, seconds=300)
    assert outcome.sizes == [(0, 1), (4, 3), (9, 2)]
    outcome.assert_every_sample_once(epochs=3)
