"""Everybody in a pool has the same settings, or is told what is wrong."""

import asyncio

import pytest

from resile_learner.agent.settings import LearnerSettings
from resile_registry.settings import RegistrySettings
from resile_scheduler.settings import SchedulerSettings
from resile_shared import pool_settings
from resile_shared.errors import UsageError
from resile_shared.messages.pool import PoolSettings
from resile_shared.pool_settings import load_pool_settings, store_pool_settings
from resile_shared.settings import ServiceSettings, load
from resile_shared.version import VERSION, VersionMismatch
from resile_testing.fixtures import Pool


async def test_who_is_told_nothing_waits_for_the_settings_of_the_pool_and_takes_them(pool: Pool) -> None:
    registry, agent = await pool.bus("registry"), await pool.bus("learner")
    asking = asyncio.create_task(load_pool_settings(agent, detection_seconds=None))
    await store_pool_settings(registry, PoolSettings(detection_seconds=6.0, version=VERSION))
    settings = await asking
    assert settings.detection_seconds == 6.0
    assert (settings.beat_seconds, settings.lease_seconds) == (2.0, 4.0)


async def test_who_is_told_what_the_pool_becomes_waits_for_that(pool: Pool) -> None:
    registry, scheduler = await pool.bus("registry"), await pool.bus("scheduler")
    await store_pool_settings(registry, PoolSettings(detection_seconds=3.0, version=VERSION))
    asking = asyncio.create_task(load_pool_settings(scheduler, detection_seconds=6.0))
    await store_pool_settings(registry, PoolSettings(detection_seconds=6.0, version=VERSION))
    assert (await asking).detection_seconds == 6.0


async def test_a_service_with_another_setting_is_refused(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_settings, "GRACE_SECONDS", 0.2)
    registry, agent = await pool.bus("registry"), await pool.bus("learner")
    await store_pool_settings(registry, PoolSettings(detection_seconds=3.0, version=VERSION))
    fault = r"^--detection-seconds 9 differs from the pool's setting, 3: omit the option, or restart"
    with pytest.raises(UsageError, match=fault):
        await load_pool_settings(agent, detection_seconds=9.0)


@pytest.mark.parametrize(("version", "name"), [("9.9.9", "Resile 9.9.9"), ("", "an older version of Resile")])
async def test_a_service_of_another_version_than_its_pool_is_refused(
    version: str, name: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_settings, "GRACE_SECONDS", 0.2)
    registry, agent = await pool.bus("registry"), await pool.bus("learner")
    await store_pool_settings(registry, PoolSettings(detection_seconds=3.0, version=version))
    with pytest.raises(
        VersionMismatch, match=rf"^this machine runs Resile {VERSION}, but its pool runs {name}: install"
    ):
        await load_pool_settings(agent, detection_seconds=None)


@pytest.mark.parametrize("settings", [RegistrySettings, SchedulerSettings, LearnerSettings])
def test_what_cannot_work_is_refused_by_every_service(settings: type[ServiceSettings]) -> None:
    needed = ["--credentials", "x", *(["--folder", "y", "--storage", "z"] if settings is LearnerSettings else [])]
    for wrong in ("0.5", "-1", "4000", "soon"):
        with pytest.raises(UsageError, match="--detection-seconds or RESILE_DETECTION_SECONDS must be"):
            load(settings, program="resile_test", arguments=[*needed, "--detection-seconds", wrong])
