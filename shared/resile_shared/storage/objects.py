"""Objects in storage, by key: a folder, S3, Google Cloud or Azure, all through obstore. Writes survive a loss of power.

The only place that knows obstore: its errors become a StorageError that says what to do. Credentials and endpoints come
from the environment that the cloud's own tools use (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, AZURE_STORAGE_ACCOUNT_NAME,
GOOGLE_APPLICATION_CREDENTIALS, ...). Once used, obstore keeps threads, and hangs in any child that is forked later.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from obstore import exceptions as foreign
from obstore.store import LocalStore, ObjectStore, from_url

from ..errors import ResileError, UsageError
from ..folders import remove_tree
from ..text import printable

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

PROBE = "probe"
"""Key of an object that `up` writes: a host that cannot read it does not share the pool's storage."""
_WAITS_SECONDS = (0.2, 1.0, 3.0)  # before the second, third and fourth attempt
_DOWNLOAD_BYTES = 8 * 2**20
REQUEST_SECONDS = 600.0
"""Seconds that the answer to a request may take: 32 MiB in obstore's own 30 s would need 9 Mbit/s for each worker."""
_RETRY_SECONDS = 60.0
_FOREIGN = (foreign.BaseError, OSError, ValueError)

T = TypeVar("T")


class StorageError(ResileError):
    """The storage failed or refused. ``transient`` says that trying again may help."""

    def __init__(self, action: str, reason: str, advice: str, *, transient: bool = False) -> None:
        super().__init__(f"cannot {action}: {reason}; {advice}")
        self.reason = reason
        self.advice = advice
        self.transient = transient


class StorageURLError(StorageError, UsageError):
    """What was given is not a URL of storage."""


class NameRefused(StorageError):
    """No object can have that name."""


class MissingObjectError(StorageError):
    """There is no such object."""

    def __init__(self, action: str, key: str) -> None:
        super().__init__(action, "it is not there", "it may have been deleted, or the URL is that of another run")
        self.key = key


class ObjectChanged(StorageError):
    """The object is another one by now."""

    def __init__(self, action: str) -> None:
        super().__init__(action, "it was replaced meanwhile", "try again, or when it is not written any more")


class ObjectVersion(NamedTuple):
    """An object as it is now."""

    num_bytes: int
    mark: str
    """The ETag of the object, or its time of change."""


@dataclass(frozen=True)
class ObjectSnapshot:
    """One version of an object."""

    num_bytes: int
    read_range: Callable[[int, int], memoryview]
    """A function that reads bytes ``start`` to ``stop``, at least one. Raises ObjectChanged, other StorageError."""


class ObjectStorage:
    """The objects under one URL. Every call blocks; any thread may call. Raises StorageError.

    A folder is made if it is not there and ``creates`` is true. A request to a cloud may take ``request_seconds``.
    """

    def __init__(self, url: str, *, creates: bool = True, request_seconds: float = REQUEST_SECONDS) -> None:
        self.url = url
        self._store = _attempt(
            f"use the storage {url!r}", "", lambda: _open(url, creates=creates, request_seconds=request_seconds)
        )

    def put(self, key: str, buffers: Sequence[bytes | memoryview]) -> None:
        """Write an object, whole or not at all, over what is there."""

        # One request: parts are small enough, and an upload in many can leave some behind when the process is killed.
        def attempt() -> None:
            self._store.put(key, buffers, use_multipart=False)
            self._sync(key)

        self._do("write", key, attempt)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object only if there is none of that key. False when there is one."""

        def attempt() -> bool:
            try:
                self._store.put(key, content, mode="create")
            except foreign.AlreadyExistsError:
                return False
            self._sync(key)
            return True

        return self._do("write", key, attempt)

    def size(self, key: str) -> int:
        """Count the bytes of an object."""
        return self._do("read", key, lambda: self._store.head(key)["size"])

    def read(self, key: str) -> bytes:
        """Read a small object whole."""
        return self._do("read", key, lambda: bytes(self._store.get(key).bytes()))

    def read_range(self, key: str, start: int, stop: int) -> memoryview:
        """Read bytes ``start`` to ``stop``, at least one, of an object that has them."""
        return self._do("read", key, lambda: memoryview(self._store.get_range(key, start=start, end=stop)))

    def snapshot(self, key: str) -> "ObjectSnapshot":
        """Return an object as it is now."""

        def attempt() -> ObjectSnapshot:
            meta = self._store.head(key)
            return ObjectSnapshot(meta["size"], partial(self._read_range_of, key, meta["e_tag"]))

        return self._do("read", key, attempt)

    def _read_range_of(self, key: str, e_tag: str | None, start: int, stop: int) -> memoryview:
        options: GetOptions = {"range": (start, stop)}
        if e_tag is not None:
            options["if_match"] = e_tag
        return self._do("read", key, lambda: memoryview(self._store.get(key, options=options).bytes()))

    def sizes(self, prefix: str) -> dict[str, int]:
        """List what is in a folder and below: keys and numbers of bytes."""
        return self._do(
            "list", prefix, lambda: {meta["path"]: meta["size"] for metas in self._store.list(prefix) for meta in metas}
        )

    def version(self, key: str, *, by_time: bool) -> ObjectVersion:
        """Return the size of an object, and its ETag or, with ``by_time``, its time of change."""
        return self._do("read", key, lambda: _version(self._store.head(key), by_time=by_time))

    def versions(self, prefix: str, *, by_time: bool) -> dict[str, ObjectVersion]:
        """List what is in a folder and below, with its `version`."""

        def attempt() -> dict[str, ObjectVersion]:
            listed = (meta for metas in self._store.list(prefix or None) for meta in metas)
            found: dict[str, ObjectVersion] = {}
            for meta in listed:
                found.setdefault(meta["path"], _version(meta, by_time=by_time))  # S3 lists a, then its folder a/ as a
            return found

        return self._do("list", prefix, attempt)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are gone already do no harm."""
        remaining = list(keys)
        try:
            self._do("delete", ", ".join(remaining[:1]), lambda: self._store.delete(remaining))
        except MissingObjectError:
            for key in remaining:
                with suppress(MissingObjectError):
                    self._do("delete", key, partial(self._store.delete, key))

    def delete_folder(self, prefix: str) -> None:
        """Delete all objects in a folder and below."""
        self.delete(self.sizes(prefix))
        if isinstance(self._store, LocalStore) and self._store.prefix is not None:
            # A process killed while it wrote leaves a file that obstore never lists.
            remove_tree(self._store.prefix / prefix)

    def upload(self, key: str, path: Path) -> None:
        """Write a file of any size as an object."""

        def attempt() -> None:
            self._store.put(key, path)
            self._sync(key)

        self._do("write", key, attempt)

    def download(self, key: str, path: Path) -> None:
        """Write an object of any size to a file, whole or not at all."""
        staged = path.with_name(f".{path.name}.partial")
        size = self.size(key)
        try:
            with staged.open("wb") as file:
                for start in range(0, size, _DOWNLOAD_BYTES):
                    file.write(self.read_range(key, start, min(start + _DOWNLOAD_BYTES, size)))
            staged.replace(path)
        except OSError as error:
            raise StorageError(
                f"write {path}", error.strerror or repr(error), "check the folder and the space there"
            ) from error
        finally:
            staged.unlink(missing_ok=True)

    def _sync(self, key: str) -> None:
        """In a folder, make an object that was written survive a loss of power, with its name and its folders'."""
        if not isinstance(self._store, LocalStore) or self._store.prefix is None:
            return
        path = self._store.prefix / key
        with suppress(FileNotFoundError):  # deleted again meanwhile
            for name in (path, *path.parents):
                descriptor = os.open(name, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                if name == self._store.prefix:
                    break

    def _do(self, verb: str, key: str, call: Callable[[], T]) -> T:
        return _attempt(f"{verb} {key} in {self.url}", key, call)


def _open(url: str, *, creates: bool, request_seconds: float) -> ObjectStore:
    if url.startswith("file:"):
        return from_url(url, mkdir=creates)
    retry_seconds = min(_RETRY_SECONDS, request_seconds)
    return from_url(
        url,
        # Plain http only where an endpoint says so.
        client_options={"timeout": timedelta(seconds=request_seconds), "allow_http": True},
        retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=retry_seconds)},
    )


def _version(meta: "ObjectMeta", *, by_time: bool) -> ObjectVersion:
    mark = None if by_time else meta["e_tag"]
    return ObjectVersion(meta["size"], mark or meta["last_modified"].isoformat())


def _attempt(action: str, key: str, call: Callable[[], T]) -> T:
    """Call, again after a pause when that may help."""
    waits = iter(_WAITS_SECONDS)
    while True:
        try:
            return call()
        except _FOREIGN as error:
            failure = _translated(action, key, error)
            wait = next(waits, None)
            if wait is None or not failure.transient:
                raise failure from error
        time.sleep(wait)


class _Cause(NamedTuple):
    """How a failure shows in obstore's text, and what to tell the user."""

    pattern: str
    reason: str
    """The reason for the user, which may use the groups of the pattern, as in `re.Match.expand`."""
    advice: str
    transient: bool = False
    kind: type[StorageError] = StorageError


_CAUSES = (
    _Cause(
        r"Unable to recognise URL|relative URL|Unknown url scheme",
        "it is not a URL of storage",
        "use file:///folder, s3://bucket/folder, gs://bucket/folder or az://container/folder",
        kind=StorageURLError,
    ),
    _Cause(
        r"service account file|Invalid Access Key|application credentials file",
        "the credentials cannot be read",
        "correct the variables that the cloud's own tools use, such as GOOGLE_APPLICATION_CREDENTIALS or "
        "AZURE_STORAGE_ACCOUNT_KEY",
    ),
    _Cause(
        r"^[^\n]*(169\.254\.169\.254|metadata\.google\.internal)",
        "there are no credentials for it",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://, GOOGLE_APPLICATION_CREDENTIALS for gs://, "
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY for az://",
    ),
    _Cause(
        r"(?s)File system loop found: (.+) points to an ancestor|operation on (.+): [^:]+ \(os error 40\)",
        r"\1\2 is a link that leads back to itself, or to a folder that contains it",
        "remove the link",
    ),
    _Cause(r"Path \"/?([^\"]*)\" contained non-unicode", r"the name \1 is not UTF-8", "rename it", kind=NameRefused),
    _Cause(r"surrogates not allowed", "the name is not UTF-8", "rename it", kind=NameRefused),
    _Cause(
        r"(?s)illegal character sequence .*whilst parsing path segment \"(.*?)\"\n",
        r"the name \1 has a control character",
        "rename it",
        kind=NameRefused,
    ),
    _Cause(r"trailing '/#\\d\+/' are not supported", "its name ends with # and digits", "rename it", kind=NameRefused),
    _Cause(r"os error 36\b|KeyTooLong", "its name is too long", "rename it", kind=NameRefused),
    _Cause(r"os error (28|122)\b", "no space is left there", "free some space, or keep fewer checkpoints"),
    _Cause(r"os error 27\b", "the file would be too large", "raise the limit on file sizes (ulimit -f)"),
    _Cause(r"os error (1|13)\b", "permission denied", "let this user read and write there, or use other storage"),
    _Cause(
        r"RequestTimeTooSkewed",
        "the clock of this machine and that of the storage differ",
        "set the clock, by NTP for example",
        transient=True,
    ),
    _Cause(
        r"ExpiredToken|TokenRefreshRequired",
        "the credentials have expired",
        "renew them in the environment of this process, and start it again",
        transient=True,
    ),
    _Cause(
        r"status code: 40[13]|PermissionDenied|Unauthenticated",
        "permission denied",
        "check the credentials in this process's environment, and what they allow",
    ),
    _Cause(r"os error 30\b", "the file system is read-only", "make it writable, or use other storage"),
    _Cause(r"os error 20\b", "a part of the path is a file, not a folder", "choose another folder"),
    _Cause(
        r"^No such file or directory|Unable to canonicalize", "there is no such folder", "create it, or correct the URL"
    ),
    _Cause(r"NoSuchBucket|bucket does not exist", "there is no such bucket", "create it, or correct the URL"),
    _Cause(r"NoSuchContainer|ContainerNotFound", "there is no such container", "create it, or correct the URL"),
    _Cause(
        r"Account must be specified|MissingAccount|MissingRegion|MissingBucket",
        "the URL or the environment lacks a setting",
        "set the variables that the cloud's own tools use, such as AWS_REGION or AZURE_STORAGE_ACCOUNT_NAME",
    ),
    _Cause(
        r"error sending request|kind: (Connect|Request|Timeout|Interrupted)\b",
        "the storage cannot be reached",
        "check that it runs, and that this host reaches it",
        transient=True,
    ),
    _Cause(
        r"status code: (429|5\d\d)",
        "the storage is overloaded or out of order",
        "check that it is healthy",
        transient=True,
    ),
    # The answer to a HEAD request has no body that says more.
    _Cause(
        r"status code: 400(?:.*<Code>(\w+)</Code>)?",
        r"the storage refuses the request: status 400 \1",
        "check the URL and the region, and that the credentials in this process's environment have not expired",
        transient=True,
    ),
)
_DURATION = re.compile(r" in \d[\d.]*(?:ns|µs|ms|s)\b")


def _translated(action: str, key: str, error: Exception) -> StorageError:
    text = f"{error}\n{type(error).__name__}"
    for cause in _CAUSES:
        if match := re.search(cause.pattern, text):
            reason = printable(match.expand(cause.reason)).strip()
            return cause.kind(action, reason, cause.advice, transient=cause.transient)
    if isinstance(error, FileNotFoundError):
        return MissingObjectError(action, key)
    if isinstance(error, foreign.PreconditionError):
        return ObjectChanged(action)
    # The same failure has the same text each time: what is equal is reported once.
    summary = _DURATION.sub("", text.partition("\n")[0]) or repr(error)
    return StorageError(action, summary, "check that the storage is reachable and healthy", transient=True)
