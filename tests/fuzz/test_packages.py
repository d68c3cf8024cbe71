"""Whatever bytes come as a package: they are unpacked inside their folder, or refused."""

import asyncio
import gzip
import io
import signal
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

import hypothesis.strategies as st
from hypothesis import given

from resile_shared.storage import archives
from resile_shared.storage.archives import InvalidArchive, unpack_archive

from .fuzzing import fuzzed

MAX_BYTES = 1 << 20
MAX_SECONDS = 10
_FIELDS = {
    "name": (0, 100),
    "mode": (100, 8),
    "size": (124, 12),
    "mtime": (136, 12),
    "type": (156, 1),
    "link": (157, 100),
}


def member(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def packed(form: int, *members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


MEMBERS = (
    member("train.py", b"print()\n"),
    member("inner/" + "d/" * 60 + "data.txt", b"x" * 700),
    member("n" * 300 + "\u00fc", b"long name"),
    member("folder", type=tarfile.DIRTYPE),
    member("link", type=tarfile.SYMTYPE, linkname="../" * 30 + "outside"),
    member("hard", type=tarfile.LNKTYPE, linkname="train.py"),
    member("sized", pax_headers={"size": "-1024", "path": "../outside", "GNU.sparse.map": "0,1,99,3"}),
    member("sparse", b"1\n0\n5\nabc", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
)
SEEDS = tuple(
    packed(form, *MEMBERS[:count])
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
    for count in (1, 3, 4, len(MEMBERS))
)


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """Archives with a few bytes, or fields of headers, changed."""
    content = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(content) - 1))
        match draw(st.sampled_from(["field", "bytes", "insert", "delete", "double"])):
            case "field":
                _change_field(draw, content, place // 512 * 512)
            case "bytes":
                new = draw(st.binary(min_size=1, max_size=20))
                content[place : place + len(new)] = new
            case "insert":
                content[place:place] = draw(st.binary(min_size=1, max_size=600))
            case "delete":
                del content[place : place + draw(st.integers(1, 1024))]
            case _:
                content[place:place] = content[place // 512 * 512 :][:1024]
        if not content:
            break
    return bytes(content)


def _change_field(draw: st.DrawFn, content: bytearray, start: int) -> None:
    """Change one field of the header at ``start``, and make its checksum right."""
    offset, length = _FIELDS[draw(st.sampled_from(sorted(_FIELDS)))]
    values = st.binary(min_size=length, max_size=length) | st.sampled_from(
        [
            b"\xff" * length,
            b"\x80" + b"\xff" * (length - 1),
            b"7" * length,
            b"-1".ljust(length, b"\0"),
            b"x",
            b"g",
            b"S",
            b"L",
        ]
    )
    value = draw(values)[:length].ljust(length, b"\0")
    content[start + offset : start + offset + length] = value
    header = content[start : start + 512]
    if len(header) == 512:
        header[148:156] = b" " * 8
        content[start + 148 : start + 156] = b"%06o\0 " % sum(header)


PACKAGES = (
    tars().map(lambda content: gzip.compress(content, mtime=0))
    | st.tuples(tars(), st.integers(0, 200), st.binary(max_size=8)).map(
        lambda parts: gzip.compress(parts[0], mtime=0)[: -parts[1] or None] + parts[2]
    )
    | st.binary(max_size=200)
)


def _hang(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"it takes over {MAX_SECONDS} seconds")


def assert_is_inside(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} <= {"package", "unpacked"}
    assert all(path.is_file() or path.is_dir() for path in folder.rglob("*"))
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert sum(path.lstat().st_size for path in (folder / "unpacked").rglob("*") if path.is_file()) <= MAX_BYTES


@fuzzed(examples=300)
@given(PACKAGES)
def test_the_reader_of_packages_judges_everything(content: bytes) -> None:
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(MAX_SECONDS)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "package").write_bytes(content)
            checked = archives.judge(folder / "package", None, MAX_BYTES)
            assert archives.judge(folder / "package", folder / "unpacked", MAX_BYTES)[0] == checked[0]
            assert checked[1].isprintable()
            assert_is_inside(folder)
    finally:
        signal.alarm(0)


@fuzzed(examples=10)
@given(PACKAGES)
def test_the_process_that_unpacks_ends_and_leaves_nothing_outside(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "package").write_bytes(content)
        with suppress(InvalidArchive):
            asyncio.run(unpack_archive(folder / "package", folder / "unpacked", max_bytes=MAX_BYTES))
        assert_is_inside(folder)
