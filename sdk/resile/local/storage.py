"""The object storage of a local run: the run's folder, or what the user named."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from resile_learner.checkpoint.manifest import FOLDER, is_manifest_key
from resile_shared.storage.model_files import format_of, key_of

PROBE = "probe"


def local_folder(storage: str) -> Path | None:
    """Return the path behind a file:// URL, None for any other."""
    parts = urlsplit(storage)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def try_storage(url: str) -> None:
    """Find out now, and not at the first checkpoint, what is wrong with storage that the user named."""
    from resile_shared.storage.objects import ObjectStorage  # only now: it loads the clients of all clouds

    storage = ObjectStorage(url)
    storage.put(PROBE, [b"resile"])
    storage.delete([PROBE])


def has_checkpoint(storage: str) -> bool:
    """Whether there is a complete checkpoint, also if the workers ended before one of them could report it.

    False if the storage cannot be read.
    """
    from resile_shared.storage.objects import ObjectStorage, StorageError

    try:
        keys = ObjectStorage(storage).sizes(FOLDER)
    except StorageError:
        return False
    return any(is_manifest_key(key) for key in keys)


def fetch_model(storage: str, key: str, output: Path | None) -> str:
    """Copy the model ``key`` to ``output``, if there is one; return where the model is."""
    if output is None:
        folder = local_folder(storage)
        return str(folder / key) if folder else f"{storage.rstrip('/')}/{key}"
    from resile_shared.storage.objects import ObjectStorage

    ObjectStorage(storage).download(key_of(key, format_of(output)), output.absolute())
    return str(output)
