"""Checks and unpacks packages of code, which come from anyone who may submit.

An archive is read by a process of its own, which the kernel ends when it needs too much memory or time: whatever
`tarfile` does with bytes that nobody foresaw costs that process alone. It may hold files and folders, no links.
"""

import gzip
import resource
import sys
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from ..errors import ResileError

MAX_PATHS = 20_000
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
MEMORY_BYTES = 256 << 20
CPU_SECONDS = 60
WALL_SECONDS = 180.0
_INVALID, _TOO_LARGE = 3, 4
_BLOCK_BYTES = 512
_PIECE_BYTES = 1 << 20


class InvalidArchive(ResileError):
    """An archive cannot be unpacked, or must not be."""

    def __init__(self, reason: str, *, is_too_large: bool = False) -> None:
        super().__init__(reason)
        self.is_too_large = is_too_large


async def check_archive(archive: Path, *, max_bytes: int) -> None:
    """Read a tar.gz through. Raises InvalidArchive unless it can be unpacked safely to at most ``max_bytes``."""
    await _run(str(max_bytes), str(archive))


async def unpack_archive(archive: Path, folder: Path, *, max_bytes: int) -> None:
    """Unpack a tar.gz into a new ``folder``. Raises InvalidArchive, and leaves what was unpacked by then."""
    await _run(str(max_bytes), str(archive), str(folder))


async def unpack_again(archive: Path, folder: Path, *, max_bytes: int) -> None:
    """The same for the very bytes that `unpack_archive` has unpacked before: in a thread, which starts at once."""
    import asyncio

    status, reason = await asyncio.to_thread(judge, archive, folder, max_bytes)
    if status:
        raise InvalidArchive(reason, is_too_large=status == _TOO_LARGE)


async def _run(*arguments: str) -> None:
    import asyncio  # here: for the process that it starts that would be most of its time

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __name__, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(WALL_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        raise InvalidArchive(f"unpacking it takes over {WALL_SECONDS:g} seconds") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode in (_INVALID, _TOO_LARGE):
        raise InvalidArchive(output.decode(errors="replace"), is_too_large=process.returncode == _TOO_LARGE)
    if process.returncode != 0:
        raise InvalidArchive(f"unpacking it takes over {MEMORY_BYTES >> 20} MiB of memory or {CPU_SECONDS} seconds")


def _read(archive: Path, folder: Path | None, max_bytes: int) -> None:
    """Check all members, and unpack them into ``folder`` if there is one. Reads forward only."""
    num_bytes = 0
    files: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as members:
        for member in members:
            _check_member(member)
            num_bytes += _BLOCK_BYTES + member.size
            path = PurePosixPath(member.name.lstrip("/"))
            folders.update(path.parents)
            (files if member.isreg() else folders).add(path)
            if not files.isdisjoint((path, *path.parents) if path in folders else path.parents):
                raise InvalidArchive(f"{member.name!a} is a file and a folder")
            if len(files) + len(folders) > MAX_PATHS:
                raise InvalidArchive(f"it has more than {MAX_PATHS} files and folders", is_too_large=True)
            if max(num_bytes, members.offset) > max_bytes:
                raise InvalidArchive(f"unpacked it is larger than {max_bytes} bytes", is_too_large=True)
            member.mtime = 0  # not every number is a time to every file system
            if folder is not None:
                members.extract(member, folder, filter="data")
        while piece := stream.read(_PIECE_BYTES):  # the checksum follows
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise InvalidArchive(f"unpacked it is larger than {max_bytes} bytes", is_too_large=True)
    if not files:
        raise InvalidArchive("it contains no file: pack the folder of the script")


def _check_member(member: tarfile.TarInfo) -> None:
    if not (member.isreg() or member.isdir()) or member.issparse():
        name = ascii(member.name[:MAX_NAME_BYTES])
        raise InvalidArchive(f"{name} is neither a file nor a folder: pack what links lead to (tar --dereference)")
    if member.size < 0:
        raise InvalidArchive("the size of a file is negative")
    path = member.name.encode(errors="surrogateescape")
    if len(path) > MAX_NAME_BYTES or any(len(name) > MAX_PART_BYTES for name in path.split(b"/")):
        raise InvalidArchive(f"a path is longer than {MAX_NAME_BYTES} bytes, or a name in it than {MAX_PART_BYTES}")
    tarfile.data_filter(member, "/package")
    if ".." in member.name.split("/"):
        raise InvalidArchive(f"{member.name!a} leads out of a folder")


def _limit(max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def judge(archive: Path, folder: Path | None, max_bytes: int) -> tuple[int, str]:
    """Check an archive, and unpack it into ``folder`` if there is one; return an exit status and the reason."""
    try:
        _read(archive, folder, max_bytes)
    except InvalidArchive as error:
        status, reason = _TOO_LARGE if error.is_too_large else _INVALID, str(error)
    except tarfile.FilterError as error:
        status, reason = _INVALID, f"it cannot be unpacked safely: {error}"
    except (tarfile.TarError, EOFError, zlib.error) as error:
        status, reason = _INVALID, f"it is not a tar.gz: {error}"
    except (OSError, ValueError, OverflowError) as error:
        status, reason = _INVALID, f"it cannot be unpacked: {error}"
    else:
        return 0, ""
    return status, ascii(" ".join(reason.split()))[1:-1]


def _main() -> int:
    max_bytes, archive, *folder = sys.argv[1:]
    _limit(int(max_bytes))
    status, reason = judge(Path(archive), Path(folder[0]) if folder else None, int(max_bytes))
    sys.stdout.write(reason)
    return status


if __name__ == "__main__":
    sys.exit(_main())
