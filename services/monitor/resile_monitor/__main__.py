"""``python -m resile_monitor``: one monitor."""

from resile_shared.service import main

from .service import run
from .settings import MonitorSettings

if __name__ == "__main__":
    main("monitor", MonitorSettings, run)
