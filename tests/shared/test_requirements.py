"""Requirements: one spelling for each, and a clear word about what is none."""

from pathlib import Path

import pytest

from resile_shared.errors import UsageError
from resile_shared.messages.jobs import JobSpec
from resile_shared.requirements import parse_requirement, parse_requirements, read_requirements


def test_requirements_have_one_spelling_and_order() -> None:
    assert parse_requirements([" Some_Package >= 1.0", "a[x]==2", "a[x] == 2"]) == ("a[x]==2", "some-package>=1.0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-r other.txt", "is an option of pip"),
        ("--index-url=http://x", "is an option of pip"),
        ("two words", "is not a requirement"),
        ("./folder", "is not a requirement"),
        ("a @ file:///tmp/a.whl", "names a file"),
        ("", "is not a requirement"),
    ],
)
def test_what_is_no_requirement_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_requirement(text)
    with pytest.raises(ValueError, match=reason):
        JobSpec(name="a", package="b", script="c.py", requirements=(text,))


def test_a_requirements_file_has_comments_and_empty_lines(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# what it needs\n\nEinops>=0.8  # for shapes\ntiny_package; python_version > '3'\n")
    assert read_requirements(file) == ("einops>=0.8", 'tiny-package; python_version > "3"')


def test_the_dependencies_of_a_project_are_read(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "x"\ndependencies = ["einops>=0.8"]\n')
    assert read_requirements(file) == ("einops>=0.8",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("requirements.txt", "einops\n-e .\n", "line 2: '-e .' is an option of pip"),
        ("pyproject.toml", "[project", "cannot be read"),
        ("pyproject.toml", '[project]\ndependencies = ["a b"]\n', "dependency 1: 'a b' is not a requirement"),
    ],
)
def test_a_fault_in_a_file_is_said_with_its_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as error:
        read_requirements(tmp_path / name)
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_requirements(tmp_path / "none.txt")
