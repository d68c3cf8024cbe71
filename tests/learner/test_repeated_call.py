"""A training call in the body of a loop is found by the source of its frames."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from resile_learner.training.repeated_call import enclosing_loop

CASES = {
    "in a loop": ("for fold in range(3):\n    train()\n", 1),
    "in a while loop": ("while True:\n    if True:\n        train()\n    break\n", 1),
    "in a function that a loop calls": ("def once():\n    train()\n\nfor _ in range(2):\n    once()\n", 4),
    "in a comprehension": ("found = [train() for _ in range(2)]\n", 1),
    "in an inner loop": ("for _ in range(2):\n    for _ in range(2):\n        train()\n", 2),
    "by itself": ("train()\n", 0),
    "in the head of a loop": ("for epoch in train():\n    pass\n", 0),
    "after a loop": ("for _ in range(2):\n    pass\ntrain()\n", 0),
    "in the else of a loop": ("for _ in range(2):\n    pass\nelse:\n    train()\n", 0),
    "in a function that is defined in a loop": ("for _ in range(1):\n    def once():\n        train()\nonce()\n", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_around_the_call_is_found(case: str, tmp_path: Path) -> None:
    source, line = CASES[case]
    script = tmp_path / "script.py"
    script.write_text(
        "from resile_learner.training.repeated_call import enclosing_loop\n"
        + textwrap.dedent("found_places = []\ndef train():\n    found_places.append(enclosing_loop())\n    return []\n")
        + source
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    expected = f"script.py:{line + 5}" if line else ""
    assert set(names["found_places"]) == {expected}


def test_code_without_a_source_has_no_loop() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    source = (
        "from resile_learner.training.repeated_call import enclosing_loop\n"
        "for _ in range(1):\n    place = enclosing_loop()"
    )
    exec(compile(source, "<generated>", "exec"), names)
    assert names["place"] == ""


@pytest.mark.parametrize(
    "names", [{"__name__": "resile.pool"}, {"__name__": "__main__", "__package__": "resile_learner.x"}]
)
def test_loops_of_the_product_and_of_libraries_are_none_of_the_script(names: dict[str, Any], tmp_path: Path) -> None:
    source = "for _ in range(1):\n    place = enclosing_loop()\n"
    script = tmp_path / "script.py"
    script.write_text(source)
    names |= {"enclosing_loop": enclosing_loop}
    exec(compile(source, str(script), "exec"), names)
    assert names["place"] == ""
