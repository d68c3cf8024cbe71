"""What a version of Resile has stored is read by all that know its format; another document is another format."""

from pathlib import Path

import pytest

from resile_learner.checkpoint.lineage import START_FORMAT, Start
from resile_learner.checkpoint.manifest import FORMAT, Manifest, Stored, check_format

FORMATS = Path(__file__).parent / "formats"


@pytest.mark.parametrize(("model", "name", "own"), [(Manifest, "manifest", FORMAT), (Start, "start", START_FORMAT)])
def test_a_format_never_changes(model: type[Stored], name: str, own: int) -> None:
    """Another field is a new format, with a new file: versions that know this one refuse a document with more."""
    file = FORMATS / f"{name}-{own}.json"
    content = file.read_bytes()
    check_format(file.name, content, own=own)
    assert (model.model_validate_json(content).model_dump_json(indent=1) + "\n").encode() == content
