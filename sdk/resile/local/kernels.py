"""Where runs keep what `torch.compile` has compiled, so that the next run does not compile it again."""

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

from resile_shared.folders import remove_tree

KERNELS = "TORCHINDUCTOR_CACHE_DIR"
KEEP_SECONDS = 30 * 86400.0


def kernel_folder(home: Path) -> Path:
    """Make the folder of this host and version of PyTorch in ``home``, and remove those that were not used for a month.

    All runs of a home belong to one user, so none can make another execute code that it could not run itself. Raises
    OSError.
    """
    kernels = home / "kernels"
    folder = kernels / f"torch-{version('torch')}-{platform.node()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(folder)  # its last use
    for path in kernels.iterdir():
        if time.time() - path.stat().st_mtime > KEEP_SECONDS:
            remove_tree(path)
    return folder
