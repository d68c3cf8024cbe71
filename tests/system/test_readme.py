"""A reader can copy the scripts of the README, and they do what it says."""

import re
from pathlib import Path

import pytest

from .running import plain, run

README = Path(__file__).parents[2] / "README.md"
PLAN = "0:1,10:4,25:2"


def scripts() -> dict[str, str]:
    call, loop, ordinary = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    setup, _, _ = call.rpartition("ElasticModel(")
    return {"call": call, "loop": setup + loop, "ordinary": setup + ordinary}


@pytest.mark.parametrize("name", ["call", "loop", "ordinary"])
def test_a_script_of_the_readme_has_the_same_bits_with_its_plan_and_as_a_plain_script(
    name: str, tmp_path: Path
) -> None:
    assert f"--plan {PLAN} " in README.read_text()
    script = tmp_path / "train.py"
    script.write_text(scripts()[name])
    elastic = run(script, "--plan", PLAN, home=tmp_path / "home")
    assert elastic.sha == plain(script)
    elastic.assert_every_sample_once(epochs=5)


def test_the_arguments_that_the_readme_shows_have_an_effect(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^resile run train\.py -- (--lr \S+) ", README.read_text(), re.MULTILINE)
    script = tmp_path / "train.py"
    script.write_text(scripts()["call"])
    assert plain(script, *shown.split()) != plain(script)


def test_both_ways_that_train_by_shards_have_the_same_bits(tmp_path: Path) -> None:
    shas = set()
    for name in ("call", "loop"):
        script = tmp_path / f"{name}.py"
        script.write_text(scripts()[name])
        shas.add(plain(script))
    assert len(shas) == 1
