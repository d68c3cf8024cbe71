"""Makes the processes of a pool wrong on purpose: with this folder in PYTHONPATH and WRONG_POOL naming the hole."""

import os

if name := os.environ.get("WRONG_POOL"):
    import wrong_pools

    wrong_pools.install(name)
