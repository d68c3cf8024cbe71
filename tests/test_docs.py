"""The documentation names files, functions and sections that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from resile.cli.app import command

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "bench", "examples", "tests/world")
    for path in ROOT.glob(f"{folder}/*.md")
)
FOLDERS = ("sdk", "shared", "services", "tests", "bench", "examples", "docs", "deploy")
MADE_BY_USERS = ("train.py", "main.py")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"([\w./-]+\.(?:py|md|toml|txt|yaml))(?::([A-Za-z_][\w.]*))?")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)+/")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)")


def prose(document: str) -> str:
    return FENCE.sub("", (ROOT / document).read_text())


@cache
def paths() -> tuple[str, ...]:
    """Every file and folder that a document may name; a folder ends with a slash."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    found += [path for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    return tuple("/" + path.relative_to(ROOT).as_posix() + "/" * path.is_dir() for path in found)


def find(name: str) -> list[Path]:
    """Return what ``name`` may mean: paths may begin at any folder, such as `membership/machine.py`."""
    return [ROOT / path[1:] for path in paths() if path.endswith("/" + name.removeprefix("./"))]


def names_in(file: Path) -> set[str]:
    """The names of the functions, classes, methods and constants that ``file`` defines."""

    def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            match node:
                case ast.ClassDef(name=name, body=inner):
                    yield prefix + name
                    yield from defined(inner, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield prefix + name
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    yield prefix + name

    return set(defined(ast.parse(file.read_text()).body))


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_function_that_a_document_names_exists(document: str) -> None:
    missing = []
    for code in CODE.findall(prose(document)):
        if FOLDER.fullmatch(code):
            missing += [] if find(code) else [code]
        elif (match := FILE.fullmatch(code)) and code not in MADE_BY_USERS:
            files = find(match[1])
            if not files or (match[2] and not any(match[2] in names_in(file) for file in files)):
                missing.append(code)
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_of_a_document_leads_somewhere(document: str) -> None:
    broken = []
    for path, anchor in LINK.findall(prose(document)):
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert not broken


def test_each_promise_has_what_holds_it() -> None:
    """In every column there is a function or a file that exists, or "none", and why."""
    section = (ROOT / "docs/testing.md").read_text().split("## What holds each promise\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| **")]
    assert len(rows) == 8
    for promise, *columns in rows:
        for column in columns:
            named = [match for code in CODE.findall(column) if (match := FILE.fullmatch(code))]
            assert named or column.strip().startswith("none: "), promise
            for file, name in (match.groups() for match in named):
                found = find(file)
                assert len(found) == 1, (promise, file)
                assert name is None or name in names_in(found[0]), (promise, file, name)


def test_the_index_of_the_documentation_names_every_page() -> None:
    linked = {link for link, _ in LINK.findall((ROOT / "docs/README.md").read_text())}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked == {"README.md"}


def test_the_table_of_commands_in_the_readme_names_every_command() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `resile ")]
    named = {word for row in rows for code in CODE.findall(re.split(r"(?<!\\)\|", row)[1]) for word in code.split()[:2]}
    assert set(command.commands) <= named
