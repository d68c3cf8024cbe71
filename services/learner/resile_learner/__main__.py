"""The agent of one host: `python -m resile_learner --help`."""

from resile_shared.service import main

from .agent.service import run
from .agent.settings import LearnerSettings

if __name__ == "__main__":
    main("learner", LearnerSettings, run)
