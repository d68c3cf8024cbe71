"""The files of a dataset where they come from: a folder or a file, on a disk, in a cloud, or in the pool's storage."""

import hashlib
import os
import re
import shlex
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urlparse

from ..errors import ResileError, UsageError
from ..messages.datasets import SCHEMES, Dataset
from .objects import REQUEST_SECONDS, MissingObjectError, ObjectStorage, ObjectVersion

POOL_SCHEME = "pool:"


class SourceChanged(ResileError):
    """The files of a dataset are not those that were registered."""

    def __init__(self, dataset: Dataset, listing: "Listing", *, is_local: bool = False) -> None:
        self.dataset = dataset
        now = f"{len(listing.files)} files of {listing.num_bytes:,} bytes"
        was = f"{dataset.num_files} files of {dataset.num_bytes:,} bytes"
        what = f"{now} instead of {was}" if now != was else f"{now}, some with other content"
        super().__init__(
            f"dataset {dataset.name} has changed since it was added: {dataset.uri} has {what}; use the new files with "
            f"`resile dataset add {dataset.name} {shlex.quote(dataset.uri)}{' --local' if is_local else ''}`"
        )


class SourceUnusable(UsageError):
    """A source has no files."""

    def __init__(self, uri: str, reason: str) -> None:
        super().__init__(f"{uri} cannot be a dataset: {reason}")


@dataclass(frozen=True)
class Listing:
    """What a source has now: ``files`` by their keys below ``url``. ``file`` is the key where it is a single file."""

    url: str
    files: dict[str, ObjectVersion]
    file: str | None = None

    @cached_property
    def storage(self) -> ObjectStorage:
        """Where the files are read."""
        return ObjectStorage(self.url, creates=False)

    @cached_property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files.values())

    @cached_property
    def version(self) -> str:
        """The sha256, in hex, of names, sizes and ETags or times of change."""
        sha = hashlib.sha256(b"file\n" if self.file is not None else b"folder\n")
        for key, file in sorted(self.files.items()):
            sha.update(f"{key}\0{file.num_bytes}\0{file.mark}\n".encode())
        return sha.hexdigest()

    def registered(self, name: str, uri: str) -> Dataset:
        """Return it as a dataset. Raises pydantic's ValidationError for a name or URI that cannot be."""
        return Dataset(name=name, uri=uri, num_files=len(self.files), num_bytes=self.num_bytes, version=self.version)


def source_uri(text: str) -> str:
    """Return what a user gave as a URI: a path becomes an absolute file://. Raises UsageError."""
    if text.startswith(SCHEMES):
        return text.rstrip("/")
    if re.match(r"[a-z][a-z0-9+.-]*:", text):
        raise UsageError(f"{text}: use a path or {', '.join(SCHEMES)}")
    return Path(text).expanduser().absolute().as_uri()


def local_path(uri: str) -> Path | None:
    """Return the path behind a file:// URI; None for any other."""
    return Path(unquote(urlparse(uri).path)) if uri.startswith("file://") else None


def list_source(uri: str, *, pool: str = "", request_seconds: float = REQUEST_SECONDS) -> Listing:
    """List the files of a source, with ``pool`` the URL of the pool's storage. Raises SourceUnusable, StorageError.

    It may take ``request_seconds`` to answer each request.
    """
    try:
        return _list(uri, pool, request_seconds)
    except OSError as error:
        raise SourceUnusable(uri, error.strerror or repr(error)) from error
    except ValueError as error:
        raise SourceUnusable(uri, f"it is not a valid URI: {error}") from error


def check_unchanged(dataset: Dataset, listing: Listing, *, is_local: bool = False) -> None:
    """Raises SourceChanged if ``listing`` is not that of the dataset when it was registered, in the home if local."""
    if listing.version != dataset.version:
        raise SourceChanged(dataset, listing, is_local=is_local)


def _list(uri: str, pool: str, request_seconds: float) -> Listing:
    url = _url_of(uri, pool)
    path = local_path(url)
    if path is not None and not path.exists():
        raise SourceUnusable(uri, f"there is no {path} on this host" if url == uri else "there are no files")
    file = _as_file(url, path, request_seconds)
    if file is not None:
        return file
    storage = ObjectStorage(url, creates=False, request_seconds=request_seconds)
    files = _without_markers(uri, storage.versions("", by_time=path is not None))
    if bad := next((key for key in files if ".." in key.split("/")), None):
        raise SourceUnusable(uri, f"the name {bad} leads out of it")
    if path is not None and (unlisted := _unlisted(path, files)):
        raise SourceUnusable(uri, f"the name {unlisted} cannot be used: rename the file, or add the dataset again")
    if not files:
        raise SourceUnusable(uri, "there are no files")
    return Listing(url, files)


def _url_of(uri: str, pool: str) -> str:
    """Return the URL of the storage behind a source. Raises SourceUnusable."""
    if not uri.startswith(SCHEMES):
        raise SourceUnusable(uri, f"use {', '.join(SCHEMES)}")
    if not uri.startswith(POOL_SCHEME):
        if mark := next((mark for mark in "#?" if mark in uri), ""):
            raise SourceUnusable(uri, f"write {quote(mark)} instead of {mark}, which ends the path of a URL")
        return uri
    if not pool:
        raise SourceUnusable(uri, "it is in the storage of a pool, and there is no pool here")
    folder = uri.removeprefix(POOL_SCHEME).strip("/")
    if {"", ".", ".."} & set(folder.split("/")):
        raise SourceUnusable(uri, "name a folder of the pool's storage, as in pool:jobs/job-3/output")
    return f"{pool.rstrip('/')}/{quote(folder)}"


def _without_markers(uri: str, files: Mapping[str, ObjectVersion]) -> dict[str, ObjectVersion]:
    """Leave out the empty objects that some tools write for folders. Raises SourceUnusable for one that has bytes."""
    folders = {"", *(str(parent) for key in files for parent in PurePosixPath(key).parents)}
    if bad := next((key for key in files if key in folders and files[key].num_bytes), None):
        raise SourceUnusable(uri, f"the object {bad} has content and is also a folder: rename it")
    return {key: version for key, version in files.items() if key not in folders}


def _unlisted(folder: Path, files: Container[str]) -> str | None:
    """Name a file that the storage does not list, such as ``model#1``, which it takes for a part of an upload."""
    for root, _, names in os.walk(folder, followlinks=True):
        for path in (Path(root, name) for name in names):
            name = path.relative_to(folder).as_posix()
            if name not in files and path.is_file():
                return name
    return None


def _as_file(uri: str, path: Path | None, request_seconds: float) -> Listing | None:
    """The source as a single file; None if it is none."""
    parent, _, name = uri.rpartition("/")
    if (path is not None and not path.is_file()) or not name or parent.endswith("/"):
        return None
    key = path.name if path else unquote(name)
    try:
        storage = ObjectStorage(parent, creates=False, request_seconds=request_seconds)
        version = storage.version(key, by_time=path is not None)
    except MissingObjectError:
        return None
    return Listing(parent, {key: version}, key)
