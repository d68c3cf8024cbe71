"""What is packed for a job, and what is refused."""

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from resile import package
from resile.package import MAX_BYTES, Package, pack
from resile.pool.home import PoolHome
from resile.secret_files import PATTERN
from resile_shared.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of code, with what should never travel."""
    folder = tmp_path / "code"
    contents = {
        "train.py": "print('hello')",
        "model.py": "",
        "settings.json": "{}",
        "parts/__init__.py": "",
        "parts/block.py": "",
        "parts/weights.txt": "1",
        "data/points.csv": "1,2",
        ".git/config": "",
        ".env": "SECRET=1",
        "__pycache__/train.cpython-311.pyc": "",
        "parts/__pycache__/block.cpython-311.pyc": "",
        "environment/pyvenv.cfg": "",
        "environment/lib/x.py": "",
    }
    for name, text in contents.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


HIDDEN = (".env (hidden)", "environment/ (virtual environment)")
"""What is left out of `folder`, and named."""


def names(package: Package) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(package.content)) as archive:
        return archive.getnames()


def test_a_folder_is_packed_whole_without_what_is_hidden_or_generated(folder: Path) -> None:
    package = pack(folder)
    assert package.script == "train.py"
    assert names(package) == [
        "data/points.csv",
        "model.py",
        "parts/__init__.py",
        "parts/block.py",
        "parts/weights.txt",
        "settings.json",
        "train.py",
    ]
    assert package.left_out == HIDDEN


def test_a_script_takes_along_what_lies_beside_it_and_its_packages(folder: Path) -> None:
    (folder / "large.bin").write_bytes(bytes(2 * 10**6))
    package = pack(folder / "train.py")
    assert package.left_out == (*HIDDEN, "large.bin (2 MB)")
    assert names(package) == [
        "data/points.csv",
        "model.py",
        "parts/__init__.py",
        "parts/block.py",
        "parts/weights.txt",
        "settings.json",
        "train.py",
    ]


def test_a_large_folder_below_a_script_is_left_out_and_named(folder: Path) -> None:
    for number in range(1001):
        (folder / "data" / f"{number}").touch()
    (folder / "more").mkdir()
    for number in range(11):
        (folder / "more" / f"{number}").write_bytes(bytes(10**6))
    (folder / "more" / "large").write_bytes(bytes(2 * 10**6))
    package = pack(folder / "train.py")
    assert package.left_out == (*HIDDEN, "data/ (over 1000 files)", "more/ (over 10 MB)")
    assert not any(name.startswith(("data", "more")) for name in names(package))


def test_folders_below_a_script_that_do_not_fit_together_are_left_out_and_named(folder: Path) -> None:
    """A script, its packages and what lies beside it are sent whatever folders lie below."""
    for number in range(6):
        (folder / f"data-{number}").mkdir()
        for part in range(10):
            (folder / f"data-{number}" / str(part)).write_bytes(bytes(950_000))
    (folder / "parts" / "weights").write_bytes(bytes(9 * 10**6))
    package = pack(folder / "train.py")
    assert package.left_out[2:] == ("data-4/ (over 50 MB with the rest)", "data-5/ (over 50 MB with the rest)")
    assert {"train.py", "parts/weights", "data-3/9"} <= set(package.files)
    for number in range(6):
        for part in range(900):
            (folder / f"data-{number}" / str(part)).write_bytes(b"")
    (folder / "parts" / "weights").unlink()
    assert pack(folder / "train.py").left_out[2:] == ("data-5/ (over 5000 files with the rest)",)


@pytest.mark.parametrize("is_script", [True, False])
def test_the_script_is_sent_whatever_resileignore_says(folder: Path, *, is_script: bool) -> None:
    (folder / ".resileignore").write_text("*.py\n*.txt\n*.json\n*.csv\n")
    assert names(pack(folder / "train.py" if is_script else folder)) == ["train.py"]
    (folder / ".train.py").write_text("print('hidden')")
    assert names(pack(folder / ".train.py")) == [".train.py"]


@pytest.fixture
def ordinary_user() -> Iterator[Path]:
    """A folder that any user may read, and the rights of a user who is not root."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(user)


@contextmanager
def as_owner(folder: Path) -> Iterator[None]:
    user = os.geteuid()
    os.seteuid(folder.stat().st_uid)
    yield
    os.seteuid(user)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_folders_and_files_below_a_script_that_cannot_be_read_are_left_out_and_named(
    folder: Path, ordinary_user: Path, mode: int
) -> None:
    code = ordinary_user / "code"
    with as_owner(ordinary_user):
        shutil.copytree(folder, code)
        (code / "data" / "locked").touch(mode=0)
        (code / "private" / "deeper").mkdir(parents=True)
        (code / "private").chmod(mode)
        expected = names(pack(folder / "train.py"))
    try:
        package = pack(code / "train.py")
        assert package.left_out == (*HIDDEN, "data/locked (not readable)", "private/ (not readable)")
        assert names(package) == expected
        with pytest.raises(UsageError, match=r"private cannot be packed: Permission denied: .*\.resileignore"):
            pack(code)
    finally:
        with as_owner(ordinary_user):
            (code / "private").chmod(0o700)


@pytest.mark.parametrize("is_script", [True, False])
def test_what_resileignore_names_is_not_sent(folder: Path, *, is_script: bool) -> None:
    (folder / "parts" / "data").write_text("a file")
    (folder / "parts" / "notes").mkdir()
    (folder / "parts" / "notes" / "model.py").write_text("")
    (folder / ".resileignore").write_text("# not these\n\n*.json\ndata/\nparts/*.txt\n/model.py\n")
    assert names(pack(folder / "train.py" if is_script else folder)) == [
        "parts/__init__.py",
        "parts/block.py",
        "parts/data",
        "parts/notes/model.py",
        "train.py",
    ]


SECRETS = (
    *("key.pem", "SERVER.KEY", "id_rsa", "id_ed25519.old", "prod.env", "kubeconfig", "x.tfstate.backup", "creds.json"),
    *("credentials", "aws_credentials.csv", "Credentials.JSON", "client_secret_7.apps.x.json", "openai_key.txt"),
    *("token", "hf_token.txt~", "api-keys.txt", "#secrets.toml#", "passwords.yml", "htpasswd", "kaggle.json", "netrc"),
    *("rootkey.csv", "user_accessKeys.csv", "token.pickle", "terraform.tfvars.json", "x.keytab", "bash_history"),
    "service-account-prod.json",
)
HARMLESS = (
    *("id_rsa.pub", "id_map.json", "id_00001", "tokens.txt", "tokenizer.json", "special_tokens_map.json", "cls_token"),
    *("credentials.py", "secret_santa.csv", "monkey.json", "keys.json", "environment.yml", "vocab.json"),
    *("password_strength.csv", "passwd_test.py", "primary_key.csv", "history.json", "next_token.yaml"),
)


@pytest.mark.parametrize("is_script", [True, False])
def test_what_usually_holds_a_secret_is_left_out_and_named_unless_asked_for(folder: Path, *, is_script: bool) -> None:
    for name in (*SECRETS, *HARMLESS):
        (folder / name).touch()
    (folder / "secrets").mkdir()
    (folder / "secrets" / "database.txt").touch()
    package = pack(folder / "train.py" if is_script else folder)
    assert set(HARMLESS) <= set(package.files)
    expected = {f"{name} (may be a secret)" for name in (*SECRETS, "secrets/")}
    assert expected == {reason for reason in package.left_out if "secret)" in reason}
    assert not any(Path(name).name in SECRETS or "database" in name for name in package.files)
    (folder / ".resileignore").write_text("!key.pem\n!.env\n")
    assert {"key.pem", ".env"} <= set(pack(folder / "train.py" if is_script else folder).files)
    (folder / ".resileignore").write_text("!*\n!*.*\n")
    assert set(SECRETS).isdisjoint(pack(folder / "train.py" if is_script else folder).files), (
        "a glob asks for no secret"
    )


def test_data_in_a_package_of_secrets_is_left_out(folder: Path) -> None:
    (folder / "secrets").mkdir()
    for name in ("__init__.py", "vault.py", "prod.yaml"):
        (folder / "secrets" / name).touch()
    package = pack(folder / "train.py")
    assert {"secrets/__init__.py", "secrets/vault.py"} <= set(package.files)
    assert "secrets/prod.yaml (may be a secret)" in package.left_out


def test_the_page_knows_the_same_names() -> None:
    page = files("resile_monitor").joinpath("page/submit_view.js").read_text()
    assert f"const SECRET = /{PATTERN}/i;\n" in page


KEY_FILES = {
    "notes.txt": "so:\n-----BEGIN OPENSSH PRIVATE KEY-----\nabc",
    "cloud.json": '{"type": "x", "private_key": "abc"}',
    "aws": "[default]\nAWS_SECRET_ACCESS_KEY = abc",
    "shell.sh": "export AWS_SECRET_ACCESS_KEY=abc",
    "cloud.yaml": "aws_secret_access_key: abc",
    "login.ipynb": '{"cells": [{"source": "login(\\"hf_' + "a" * 34 + '\\")"}]}',
    "README.md": "-----BEGIN RSA PRIVATE KEY-----",
    "putty": "PuTTY-User-Key-File-3: ssh-ed25519",
}


def test_a_file_with_a_key_in_it_is_left_out_whatever_its_name_is(folder: Path) -> None:
    for name, text in KEY_FILES.items():
        (folder / name).write_text(text)
    (folder / "crypto.py").write_text("KEY = '-----BEGIN PRIVATE KEY-----'")
    package = pack(folder / "train.py")
    assert {f"{name} (may be a secret)" for name in KEY_FILES} <= set(package.left_out)
    assert "crypto.py" in package.files, "code is sent whole"


@pytest.mark.parametrize("is_script", [True, False])
def test_a_link_does_not_carry_a_secret_out_under_another_name(
    folder: Path, tmp_path: Path, *, is_script: bool
) -> None:
    """Whatever it leads through: links, and folders."""
    outside = tmp_path / "outside"
    for name in ("vault", ".ssh/deploy", "server.key", "secrets/hf", "pool/token", "pool/lock", "pool/other"):
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).touch()
    (folder / ".env").unlink()
    (folder / ".env").symlink_to(outside / "vault")
    (folder / "prod.pem").symlink_to(outside / "vault")
    for name in (".settings/database", "ignored/x", "demo-out/x", "secrets/sub/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / ".gitignore").write_text("ignored/\n")
    links = {
        "a": (".env", "link to a hidden file"),
        "b": ("prod.pem", "link to what may be a secret"),
        "c": (outside / ".ssh" / "deploy", "link to a hidden file"),
        "d": (outside / "server.key", "link to what may be a secret"),
        "e/": (".settings", "link to a hidden file"),
        "f": (outside / "secrets" / "hf", "link to what may be a secret"),
        "g/": ("secrets/sub", "link to what may be a secret"),
        "h": ("ignored/x", "link to what is ignored"),
        "i/": ("ignored", "link to what is ignored"),
        "j": ("demo-out/x", "link to what is ignored"),
        "k": (outside / "pool" / "other", "link into a home of Resile"),
        "l": ("/proc/self/environ", "link to no ordinary file"),
        "m": ("a", "link to a hidden file"),
    }
    for name, (target, _) in links.items():
        (folder / name.rstrip("/")).symlink_to(target)
    (folder / "good").symlink_to("model.py")
    package = pack(folder / "train.py" if is_script else folder)
    named = {left for left in package.left_out if "link" in left}
    assert named == {f"{name} ({reason})" for name, (_, reason) in links.items()}
    assert "good" in package.files
    assert not {name.split("/")[0] for name in package.files} & {name.rstrip("/") for name in links}


@pytest.mark.parametrize("is_script", [True, False])
def test_homes_beside_a_script_do_not_go_with_it(folder: Path, *, is_script: bool) -> None:
    pool = PoolHome(folder / "pool")
    pool.announce("http://127.0.0.1:1", storage="file:///tmp/x")
    package = pack(folder / "train.py" if is_script else folder)
    pool.close()
    assert "pool/ (a home of Resile)" in package.left_out
    assert not any(name.startswith("pool/") for name in package.files)


def test_a_home_without_its_mark_is_one(folder: Path) -> None:
    pool = PoolHome(folder / "pool")
    pool.announce("http://127.0.0.1:1", storage="file:///tmp/x")
    pool.close()
    (folder / "pool" / "format").unlink()
    assert "pool/ (a home of Resile)" in pack(folder).left_out
    (folder / "data" / "format").write_text("16")
    assert "data/format" in pack(folder).files


@pytest.mark.parametrize("below", [".", "src"])
def test_a_script_in_a_home_of_resile_goes_alone(folder: Path, below: str) -> None:
    PoolHome(folder).close()
    (folder / "src").mkdir()
    place = (folder / below).resolve()
    (place / "train.py").touch()
    (place / "other.py").touch()
    package = pack(place / "train.py")
    assert list(package.files) == ["train.py"]
    assert package.left_out == (f"all files beside train.py ({place} is in a home of Resile)",)
    with pytest.raises(UsageError, match="is in a home of Resile and is not uploaded"):
        pack(place)


def test_folders_that_are_nested_too_deeply_are_refused(folder: Path) -> None:
    subprocess.run(["mkdir", "-p", folder / "data" / "/".join(1200 * ["a"])], check=True)
    try:
        with pytest.raises(UsageError, match="nested too deeply"):
            pack(folder)
    finally:
        subprocess.run(["rm", "-r", folder / "data"], check=True)  # Python cannot


@pytest.mark.parametrize("is_script", [True, False])
def test_what_a_gitignore_names_is_left_out_and_named_unless_asked_for(folder: Path, *, is_script: bool) -> None:
    (folder / ".gitignore").write_text("data/\n*.json\n")
    path = folder / "train.py" if is_script else folder
    package = pack(path)
    assert package.left_out == (HIDDEN[0], "data/ (in .gitignore)", HIDDEN[1], "settings.json (in .gitignore)")
    (folder / ".resileignore").write_text("!data\n")
    package = pack(path)
    assert "data/points.csv" in package.files
    assert "settings.json" not in package.files


def test_patterns_of_resileignore_include_again_and_cross_folders(folder: Path) -> None:
    (folder / "parts" / "deep").mkdir()
    for name in ("a.csv", "keep.csv", "parts/deep/model.bin", "parts/deep/model.txt"):
        (folder / name).write_text("data")
    (folder / ".resileignore").write_text("*.csv\n!keep.csv\nparts/**/*.bin\n")
    found = names(pack(folder))
    assert {"keep.csv", "parts/deep/model.txt"} <= set(found)
    assert not {"a.csv", "parts/deep/model.bin"} & set(found)


def test_a_pattern_that_is_none_is_refused_with_its_line(folder: Path) -> None:
    (folder / ".resileignore").write_text("*.csv\n!\n")
    with pytest.raises(UsageError, match=r"\.resileignore, line 2: "):
        pack(folder)


def test_the_same_files_give_the_same_bytes_whenever_they_were_written(folder: Path) -> None:
    first = pack(folder)
    os.utime(folder / "train.py", (1, 1))
    assert pack(folder) == first


def test_a_script_in_the_home_directory_goes_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    package = pack(folder / "train.py")
    assert names(package) == ["train.py"]
    assert package.left_out == (f"all files beside train.py ({folder} is a home, system or temporary folder)",)


@pytest.mark.parametrize("place", ["/", "~"])
def test_a_home_directory_or_the_root_is_refused(place: str) -> None:
    with pytest.raises(UsageError, match="is a home, system or temporary folder"):
        pack(Path(place).expanduser())


def test_the_only_python_file_of_a_folder_is_its_script(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    assert pack(tmp_path).script == "net.py"


@pytest.mark.parametrize(("files", "what"), [([], "no Python file"), (["a.py", "b.py"], "2 Python files")])
def test_a_folder_without_a_clear_script_is_refused(tmp_path: Path, files: list[str], what: str) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match=what):
        pack(tmp_path)


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no script or folder .*none\.py"):
        pack(tmp_path / "none.py")


def test_too_much_is_refused_with_the_largest_file(folder: Path) -> None:
    with (folder / "data" / "all.bin").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UsageError, match=r"more than 50 MB, such as data/all\.bin .*keep data elsewhere"):
        pack(folder)


def test_too_many_files_are_refused(folder: Path) -> None:
    for number in range(5001):
        (folder / "data" / f"{number}").touch()
    with pytest.raises(UsageError, match="more than 5000 files"):
        pack(folder)


@pytest.mark.parametrize("is_script", [True, False])
def test_links_are_followed_inside_of_the_folder_and_named_elsewhere(
    folder: Path, tmp_path: Path, *, is_script: bool
) -> None:
    (folder / "src" / "layers").mkdir(parents=True)
    (folder / "src" / "layers" / "__init__.py").touch()
    (folder / "layers").symlink_to("src/layers")
    (folder / "src" / "again").symlink_to(folder)
    (folder / "src" / "back").symlink_to("../src")
    (folder / "gone.py").symlink_to("src/removed.py")
    (tmp_path / "shared").mkdir()
    (folder / "shared").symlink_to(tmp_path / "shared")
    (tmp_path / "outside.py").write_text("x = 1")
    (folder / "inside.py").symlink_to(tmp_path / "outside.py")
    package = pack(folder / "train.py" if is_script else folder)
    assert {"inside.py", "layers/__init__.py", "src/layers/__init__.py"} <= set(names(package))
    assert {name.split("/")[0] for name in names(package) if "/" in name} == {"data", "layers", "parts", "src"}
    assert package.left_out == (
        *HIDDEN,
        "gone.py (broken link)",
        f"shared/ (link out of the folder, to {tmp_path / 'shared'})",
        "src/again/ (link to a folder that contains it)",
        "src/back/ (link to a folder that contains it)",
    )


def test_links_to_each_other_end(folder: Path) -> None:
    """Folders that all have links to all others can be combined in millions of paths, of which none has a file."""
    places = [folder / "places" / str(number) for number in range(12)]
    for place in places:
        place.mkdir(parents=True)
    for place in places:
        for other in places:
            (place / other.name).symlink_to(other)
    package = pack(folder)
    assert any(reason.endswith("(after 100 links to folders)") for reason in package.left_out)
    assert "train.py" in names(package)


def test_what_is_neither_a_file_nor_a_folder_and_what_is_empty_is_named(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "empty").mkdir()
    assert set(pack(folder).left_out) == {*HIDDEN, "pipe (not a regular file)", "empty/ (empty)"}


def test_what_resileignore_names_and_what_tools_generate_is_left_out_without_a_word(folder: Path) -> None:
    for name in (".gitignore", ".mypy_cache/x", "node_modules/x", "parts/.ipynb_checkpoints/x", "ignored/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "link").symlink_to("nowhere")
    (folder / ".resileignore").write_text("ignored/\nlink\n.env\nenvironment\n")
    package = pack(folder)
    assert package.left_out == ()
    assert package.warning == ""
    assert not {"ignored/x", "link", ".env"}.intersection(names(package))


def test_the_warning_says_what_is_left_out_in_one_line_of_bounded_length(folder: Path) -> None:
    assert pack(folder).warning.startswith(f"not sent: {', '.join(HIDDEN)}: jobs get data with --data")
    for number in range(20):
        (folder / f".{number}").touch()
    assert "(hidden) and 12 more: " in pack(folder).warning


@pytest.mark.parametrize("step", ["_is_package", "_num_bytes", "_packed"])
def test_files_that_are_removed_meanwhile_are_left_out(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run beside the script deletes its older checkpoints: before a folder is listed, or a file sized or read."""
    done = getattr(package, step)

    def remove_before(*arguments: Any) -> Any:
        (folder / "model.py").unlink(missing_ok=True)
        found = done(*arguments) if step == "_is_package" else None
        if step != "_is_package" or arguments[0].name == "parts":  # just before it is listed
            shutil.rmtree(folder / "parts", ignore_errors=True)
        return done(*arguments) if found is None else found

    monkeypatch.setattr(package, step, remove_before)
    packed = pack(folder / "train.py")
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
        assert archive.getnames() == sorted(packed.files)
    assert "train.py" in packed.files
    assert not {"model.py", "parts/block.py"}.intersection(packed.files)


def test_a_script_that_is_removed_meanwhile_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = package._packed

    def remove_before(*arguments: Any) -> Package:
        (folder / "train.py").unlink()
        return done(*arguments)

    monkeypatch.setattr(package, "_packed", remove_before)
    with pytest.raises(UsageError, match=r"train\.py was removed while it was packed"):
        pack(folder / "train.py")
