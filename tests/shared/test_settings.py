from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from resile_shared.errors import UsageError
from resile_shared.settings import ServiceSettings, load


class Settings(ServiceSettings):
    detection_seconds: float = Field(default=3.0, gt=0)


def test_flags_come_before_the_environment_and_that_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILE_CREDENTIALS", "/from/environment")
    monkeypatch.setenv("RESILE_DETECTION_SECONDS", "5")
    settings = load(Settings, program="resile_test", arguments=["--detection-seconds", "7"])
    assert settings.detection_seconds == 7
    assert settings.credentials == Path("/from/environment")
    assert settings.health_port is None
    with pytest.raises(ValidationError):
        setattr(settings, "detection_seconds", 1.0)  # noqa: B010 - assigning is what mypy forbids


def test_all_faults_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILE_HEALTH_PORT", "many")
    with pytest.raises(UsageError) as told:
        load(Settings, program="resile_test", arguments=["--detection-seconds", "0", "--log-format", "xml"])
    for fault in (
        "--credentials or RESILE_CREDENTIALS is missing",
        "--health-port or RESILE_HEALTH_PORT must be a valid integer",
        "--detection-seconds or RESILE_DETECTION_SECONDS must be greater than 0",
        "--log-format or RESILE_LOG_FORMAT must be 'plain' or 'json'",
    ):
        assert fault in str(told.value)
    assert "\n" not in str(told.value)


def test_an_unknown_flag_is_told() -> None:
    with pytest.raises(UsageError, match="--colour"):
        load(Settings, program="resile_test", arguments=["--credentials", "x", "--colour", "red"])
