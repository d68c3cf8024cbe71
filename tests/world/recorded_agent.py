"""``python -m tests.world.recorded_agent``: an agent that writes recordings of its cores to RECORDING when it ends."""

import os
import pickle
import sys
from pathlib import Path

from resile_learner.agent.core import AgentCore
from resile_learner.agent.service import run
from resile_learner.agent.settings import LearnerSettings
from resile_shared.service import ServiceContext, main

from .recording import Recording, record


async def run_recorded(context: ServiceContext[LearnerSettings]) -> None:
    found: list[Recording] = []
    record(AgentCore, found)
    try:
        await run(context)
    finally:
        Path(os.environ["RECORDING"]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main("learner", LearnerSettings, run_recorded, arguments=sys.argv[1:])
