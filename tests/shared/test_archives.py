"""Archives from anyone: what is well formed is unpacked, and anything else costs its sender alone."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from resile_shared.storage import archives
from resile_shared.storage.archives import InvalidArchive, check_archive, unpack_archive

MAX_BYTES = 10 << 20


def header(name: str, size: int = 0, **fields: object) -> tarfile.TarInfo:
    """The header of a member."""
    member = tarfile.TarInfo(name)
    member.size = size
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def file(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    return header(name, len(content), **fields), content


WHOLE = packed(file("train.py", os.urandom(100_000)))
FOLDER = packed((header("folder", type=tarfile.DIRTYPE), b""))


async def refusal(folder: Path, content: bytes, *, max_bytes: int = MAX_BYTES) -> InvalidArchive:
    archive = folder / "package.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(InvalidArchive) as checked:
        await check_archive(archive, max_bytes=max_bytes)
    with pytest.raises(InvalidArchive) as unpacked:
        await unpack_archive(archive, folder / "unpacked", max_bytes=max_bytes)
    assert str(checked.value) == str(unpacked.value)
    assert str(checked.value).isprintable()
    return checked.value


async def test_files_and_folders_are_unpacked_as_they_were_packed(tmp_path: Path) -> None:
    archive, folder = tmp_path / "package.tar.gz", tmp_path / "unpacked"
    archive.write_bytes(packed(file("train.py", b"print()"), file("inner/tool.sh", b"true", mode=0o755)))
    await check_archive(archive, max_bytes=MAX_BYTES)
    await unpack_archive(archive, folder, max_bytes=MAX_BYTES)
    assert (folder / "train.py").read_bytes() == b"print()"
    assert os.access(folder / "inner/tool.sh", os.X_OK)


@pytest.mark.parametrize(
    "content",
    [
        WHOLE[:-20],
        WHOLE[: len(WHOLE) // 2],
        WHOLE[:-8] + b"12345678",
        b"",
        b"no archive",
        b"\x1f\x8b\x08\0" + b"\xff" * 99,
    ],
    ids=["cut short", "half", "another checksum", "empty", "no archive", "no data"],
)
async def test_what_is_not_whole_is_refused(tmp_path: Path, content: bytes) -> None:
    await refusal(tmp_path, content)


@pytest.mark.parametrize("content", [packed(), FOLDER], ids=["nothing", "a folder"])
async def test_what_contains_no_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "no file" in str(await refusal(tmp_path, content))


@pytest.mark.parametrize(
    "member",
    [
        header("../outside"),
        header("a/../../outside"),
        header("/../outside"),
        header("link", type=tarfile.SYMTYPE, linkname="train.py"),
        header("link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        header("link", type=tarfile.LNKTYPE, linkname="../outside"),
        header("pipe", type=tarfile.FIFOTYPE),
        header("device", type=tarfile.CHRTYPE),
    ],
    ids=lambda member: f"{member.name} {member.linkname}",
)
async def test_what_is_no_plain_file_inside_is_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    await refusal(tmp_path, packed(file("train.py"), (member, b"")))
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("size", ["-1024", "-1536", "-512", "-1", "-99999999999999999999", "9" * 400])
async def test_a_size_that_leads_back_or_nowhere_ends(tmp_path: Path, size: str) -> None:
    await refusal(tmp_path, packed(file("train.py"), (header("data", pax_headers={"size": size}), b"")))


async def test_many_names_cost_little_and_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb") as zipped,
        tarfile.open(fileobj=zipped, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for number in range(30_000):
            archive.addfile(header(f"{number}"))
    error = await refusal(tmp_path, buffer.getvalue())
    assert error.is_too_large
    assert "more than 20000" in str(error)


async def test_deep_folders_count_each(tmp_path: Path) -> None:
    """Twenty thousand members of five hundred new folders each would be ten million folders on every host."""
    members = [file(f"{number}/" + "d/" * 500 + "f") for number in range(50)]
    assert "files and folders" in str(await refusal(tmp_path, packed(*members)))


@pytest.mark.parametrize("length", [1025, 200_000, 20_000_000])
async def test_a_name_that_is_too_long_is_refused(tmp_path: Path, length: int) -> None:
    assert "a path is longer than 1024 bytes" in str(
        await refusal(tmp_path, packed(file("x" * length)), max_bytes=100 << 20)
    )


@pytest.mark.parametrize(
    "content",
    [packed(file("zeros", bytes(MAX_BYTES + 1))), WHOLE + gzip.compress(bytes(MAX_BYTES))],
    ids=["a file", "what follows"],
)
async def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, content: bytes) -> None:
    error = await refusal(tmp_path, content)
    assert (error.is_too_large, f"larger than {MAX_BYTES} bytes" in str(error)) == (True, True)


async def test_what_needs_too_much_memory_is_refused(tmp_path: Path) -> None:
    """An extended header is read whole before anyone can judge it."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as zipped:
        zipped.write(header("comment", archives.MEMORY_BYTES, type=tarfile.XHDTYPE).tobuf())
        for _ in range(archives.MEMORY_BYTES >> 20):
            zipped.write(bytes(1 << 20))
    assert "MiB of memory" in str(await refusal(tmp_path, buffer.getvalue(), max_bytes=8 << 30))


async def test_what_takes_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "WALL_SECONDS", 0.0)
    assert "takes over 0 seconds" in str(await refusal(tmp_path, WHOLE))


@pytest.mark.parametrize(
    "members",
    [(file("n" * 256),), (file("a"), file("a/b")), (file("a/b"), file("a")), (file("."),), (file("a/../b"),)],
)
async def test_what_no_file_system_can_hold_is_refused_at_the_upload(
    tmp_path: Path, members: tuple[tuple[tarfile.TarInfo, bytes], ...]
) -> None:
    await refusal(tmp_path, packed(file("train.py"), *members))


async def test_any_time_of_a_file_will_do(tmp_path: Path) -> None:
    archive = tmp_path / "package.tar.gz"
    archive.write_bytes(packed(file("train.py", mtime=2**62)))
    await check_archive(archive, max_bytes=MAX_BYTES)
    await unpack_archive(archive, tmp_path / "unpacked", max_bytes=MAX_BYTES)
    assert (tmp_path / "unpacked" / "train.py").exists()
