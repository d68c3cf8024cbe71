"""Services and workers may have as many connections open as the system lets them."""

import resource
import subprocess
import sys

SHOW = (
    "import resource; from resile_shared.processes import raise_descriptor_limit; raise_descriptor_limit(); "
    "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
)


def test_the_limit_is_raised_to_the_hard_one() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))

    out = subprocess.check_output([sys.executable, "-c", SHOW], preexec_fn=lower, text=True)
    assert out.split() == ["4096", "4096"]
