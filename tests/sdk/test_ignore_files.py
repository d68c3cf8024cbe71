"""A .gitignore means to a package what it means to Git, which is the oracle here."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resile.ignore_files import GitIgnored

NAMES = ("a", "b", "c.txt", "d.py", "a b", "!x", "#y", "ab", "é")
WILDCARDS = (
    *("*", "?", "**", "*.txt", "[ab]", "[!a]", "a*", "\\a", "\\!x", "\\#y", "a\\ b", "*.p?"),
    *("[[:alpha:]]", "[[:alpha:]]*.txt", "[^[:lower:]]", "[\\]a]", "[a-", "[]a]", "[!-~]", "[b-a]", "***", "a\\"),
)

names = st.sampled_from(NAMES)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
parts = st.lists(st.sampled_from((*NAMES, *WILDCARDS)), min_size=1, max_size=3).map("/".join)
patterns = st.tuples(
    st.sampled_from(("", "", "!")), st.sampled_from(("", "", "/")), parts, st.sampled_from(("", "", "/", " "))
).map("".join)
ignore_files = st.tuples(
    st.lists(names, max_size=2).map("/".join), st.lists(patterns, min_size=1, max_size=4).map("\n".join)
)


def git(folder: Path, *arguments: str) -> bytes:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True).stdout


def kept_by_git(folder: Path) -> set[str]:
    listed = git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    return {os.fsdecode(name) for name in listed.split(b"\0") if name}


def kept(folder: Path) -> set[str]:
    ignored = GitIgnored(folder)

    def below(each: Path) -> Iterator[str]:
        for entry in each.iterdir():
            if entry.name == ".git" or ignored.has(entry):
                continue
            if entry.is_dir() and not entry.is_symlink():
                yield from below(entry)
            else:
                yield entry.relative_to(folder).as_posix()

    return set(below(folder))


def write(folder: Path, name: str, text: str = "") -> None:
    """Write a file, unless a file is where it has a folder, or the other way round."""
    file = folder / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        pass


@given(st.lists(paths, min_size=1, max_size=12), st.lists(ignore_files, min_size=1, max_size=3))
@settings(max_examples=int(os.environ.get("FUZZ", "150")))
@example(["a/b/c.txt", "a/c.txt", "b"], [("", "*\n!*/\n!c.txt")])
@example(["a/c.txt", "b/c.txt"], [("", "*.txt\n!a/")])
@example(["a/b/c.txt", "b/c.txt"], [("", "b\n"), ("a", "!b\n")])
def test_what_git_keeps_is_kept(files: list[str], ignoring: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        git(folder, "init", "--quiet")
        for file in files:
            write(folder, file)
        for place, text in ignoring:
            write(folder, f"{place}/.gitignore".lstrip("/"), text)
        assert kept(folder) == kept_by_git(folder)


def test_no_pattern_takes_long(tmp_path: Path) -> None:
    patterns = ("*a" * 12 + "b", "a*" * 20 + "b", "[a-z]*" * 12 + "!", "**/" * 12 + "q", "**/*/" * 12 + "q")
    (tmp_path / ".gitignore").write_text("\n".join(patterns))
    for number in range(50):
        write(tmp_path, f"{'a' * 200}{number}")
    assert len(kept(tmp_path)) == 51


def test_a_worktree_has_the_exclusions_of_its_repository(tmp_path: Path) -> None:
    main = tmp_path / "main"
    main.mkdir()
    git(main, "init", "--quiet")
    (main / ".git" / "info" / "exclude").write_text("private\n")
    identity = ("-c", "user.name=x", "-c", "user.email=x@x")
    git(main, *identity, "commit", "--quiet", "--allow-empty", "-m", "first")
    git(main, "worktree", "add", "--quiet", str(tmp_path / "tree"))
    write(tmp_path / "tree", "private")
    write(tmp_path / "tree", "public")
    assert kept(tmp_path / "tree") - {".git"} == {"public"}


@pytest.mark.parametrize("text", ["\ufeffa\n", "a\r\nb\r\n", "a\x0cb\n", "a\n[\n\\\n!\n/\nb", "a  \nb\\ \n"])
def test_lines_end_where_git_ends_them(tmp_path: Path, text: str) -> None:
    git(tmp_path, "init", "--quiet")
    for name in ("a", "b", "a\x0cb", "b ", "[", "!"):
        write(tmp_path, name)
    (tmp_path / ".gitignore").write_bytes(text.encode())
    assert kept(tmp_path) == kept_by_git(tmp_path)


def test_a_script_folder_heeds_the_gitignore_of_the_repository_above_it_and_its_own_exclusions(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("*.log\n/scratch/\nsecond\n")
    (tmp_path / ".git" / "info" / "exclude").write_text("notes\n")
    for name in ("src/a.log", "src/notes", "src/a.py", "scratch/second", "scratch/a.py"):
        write(tmp_path, name)
    assert kept(tmp_path / "src") == {"a.py"}
    assert kept(tmp_path / "scratch") == {"a.py"}, "an ignored folder was asked for, and not what else is ignored"


def test_without_a_repository_the_gitignore_of_the_folder_counts(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("a\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / ".gitignore").write_text("b\n")
    write(tmp_path, "src/a")
    write(tmp_path, "src/b")
    assert kept(tmp_path / "src") == {".gitignore", "a"}
