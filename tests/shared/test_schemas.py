from pathlib import Path

import orjson

from resile_shared.bus import schemas
from resile_shared.bus.catalogue import model_of

FOLDER = Path(__file__).parents[2] / schemas.FOLDER


def test_the_committed_schemas_are_current() -> None:
    assert schemas.outdated(FOLDER) == []


def test_stale_files_are_found_and_mended(tmp_path: Path) -> None:
    schemas.write(tmp_path)
    assert schemas.outdated(tmp_path) == []
    (tmp_path / "JobEvent.json").write_text("{}")
    (tmp_path / "Heartbeat.json").unlink()
    (tmp_path / "Forgotten.json").touch()
    assert schemas.outdated(tmp_path) == ["Forgotten.json", "Heartbeat.json", "JobEvent.json"]
    schemas.write(tmp_path)
    assert schemas.outdated(tmp_path) == []


def test_each_channel_refers_to_the_schema_of_what_is_said_there() -> None:
    document = orjson.loads((FOLDER / "asyncapi.json").read_bytes())
    for channel in document["channels"].values():
        subject = channel["address"].format(host="h", job="j", kind="running", service="learner")
        name = model_of(subject).__name__
        assert (FOLDER / f"{name}.json").exists()
        assert channel["messages"][name]["payload"] == {"$ref": f"./{name}.json"}
