"""Workers are found by the file that each keeps open; a fork server that has it open as well is none."""

import os
import signal
import subprocess
import sys

from resile.pool.worker_processes import workers_below
from resile_learner.processes.fork_protocol import process_name

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


BUSY_WORKER = """
import os, sys
os.memfd_create(sys.argv[1], 0)
if os.fork() == 0:
    os.setsid()
    print(flush=True)
    while True:
        for descriptor in [os.dup(0) for _ in range(200)]:
            os.close(descriptor)
else:
    os.wait()
"""


def test_a_worker_is_found_while_it_opens_and_closes_files() -> None:
    command = [sys.executable, "-c", BUSY_WORKER, process_name("job-3", 7)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        found = [worker.number for _ in range(20) for worker in workers_below(os.getpid(), "host-1")]
        (worker,) = workers_below(os.getpid(), "host-1")
        os.kill(worker.pid, signal.SIGKILL)
    assert found == [7] * 20
