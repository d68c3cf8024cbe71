"""A pool that does not answer keeps nobody waiting for longer than it may."""

import pytest

from resile.http_requests import Server
from resile.pool.saving import drain_host, save_jobs

NOBODY = Server("http://127.0.0.1:1", "t")


async def test_jobs_of_a_pool_that_does_not_answer_are_not_known_to_be_saved() -> None:
    unsaved = await save_jobs(NOBODY, seconds=0.5, log=print)
    assert unsaved.startswith(
        "not saved within 0.5 s: what was training: the pool at http://127.0.0.1:1 does not answer"
    )


@pytest.mark.parametrize("has_workers", [True, False])
async def test_a_host_waits_for_a_pool_that_does_not_answer_only_while_workers_run_on_it(has_workers: bool) -> None:
    told: list[str] = []
    fault = await drain_host(NOBODY, "far", seconds=0.5, has_workers=lambda: has_workers, log=told.append)
    if has_workers:
        assert fault.startswith("did not leave far within 0.5 s: what was training")
    else:
        assert fault == ""
        assert "far was not drained, but no job runs on it" in told[0]
