"""A dataset that is registered: where its files are, and which they are."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from .message import Count, Line, Message, Positive

DatasetName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", max_length=63, description="lower-case letters, digits and -; at most 63"
    ),
]
MAX_DATASETS = 16
"""The maximum number of datasets of one job."""
MAX_URI = 1000
SCHEMES = ("file://", "s3://", "gs://", "az://", "pool:")


def _check_source(uri: str) -> str:
    if not uri.startswith(SCHEMES):
        raise ValueError(f"must begin with one of {', '.join(SCHEMES)}")
    urlsplit(uri)  # raises ValueError
    return uri


SourceURI = Annotated[
    Line,
    AfterValidator(_check_source),
    Field(max_length=MAX_URI, description="file://, s3://, gs://, az://, or pool: and a folder of its storage"),
]


class Dataset(Message):
    """A dataset as it was when it was registered."""

    name: DatasetName
    uri: SourceURI
    num_files: Positive
    num_bytes: Count
    version: str = Field(
        pattern=r"^[0-9a-f]{64}$",
        max_length=64,
        description="digest of its files' names, sizes, and ETags or modification times",
    )


def variable_of(name: str) -> str:
    """Return the environment variable that has the path of the dataset ``name``."""
    return f"RESILE_DATASET_{name.upper().replace('-', '_')}"
