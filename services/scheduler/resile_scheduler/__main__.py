"""``python -m resile_scheduler``."""

from resile_shared.service import main

from .service import run
from .settings import SchedulerSettings

if __name__ == "__main__":
    main("scheduler", SchedulerSettings, run)
