"""``python -m resile_registry``."""

from resile_shared.service import main

from .service import run
from .settings import RegistrySettings

if __name__ == "__main__":
    main("registry", RegistrySettings, run)
