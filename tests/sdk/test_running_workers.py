"""Workers are found by the file that each keeps open; a fork server that has it open as well is none."""

import os
import subprocess
import sys

from resile.pool.workers import workers_below
from resile_learner.processes.protocol import process_name

FORK_SERVER = """
import os, sys
os.memfd_create(sys.argv[1], 0)
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    sys.stdin.read()
else:
    os.wait()
"""


def test_a_fork_server_that_forks_a_worker_is_not_a_worker() -> None:
    command = [sys.executable, "-c", FORK_SERVER, process_name("job-3", 7)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        (worker,) = workers_below(os.getpid(), "host-1")
        assert (worker.job, worker.number, worker.host, worker.pid) == ("job-3", 7, "host-1", pid)
        server.communicate()
