"""The last message of a worker arrives, though its agent sends something before it has read it."""

import time
from pathlib import Path

from resile_learner.messages import Failed, Pause, WorkerConfig
from resile_learner.processes.client import ForkServerClient


async def test_a_failure_is_reported_though_the_agent_sends_before_it_reads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('bad data')")
    config = WorkerConfig(job="job-1", worker=0, script=str(script), directory=str(tmp_path), storage=tmp_path.as_uri())
    server = await ForkServerClient.start(log=tmp_path / "log")
    try:
        await server.loaded()
        process = await server.fork(config, lambda stream, line: None)
        time.sleep(1.0)  # noqa: ASYNC251 - the agent stands still until the worker wants to end
        process.send(Pause(lineage=1))
        failures = [message.message async for message in process.messages() if isinstance(message, Failed)]
        exit_ = await process.wait()
    finally:
        await server.close()
    assert failures == [exit_.message] == ["ValueError: bad data (train.py, line 1)"]
