"""What stands in for training in tests of the processes around it: small entry functions for a real fork server."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import shared_memory

from resile_learner.messages import (
    Failed,
    Finished,
    Left,
    Message,
    Order,
    Warned,
    WorkerConfig,
    WorkerListening,
    encode,
    to_worker,
)


def say(agent: socket.socket, message: Message) -> None:
    agent.sendall(encode(message))


def hello(config: WorkerConfig, agent: socket.socket) -> None:
    say(agent, WorkerListening(worker=config.worker, host="127.0.0.1", port=1))


def main(config: WorkerConfig, agent: socket.socket) -> int:
    """Act as the function that the first argument of the script names."""
    act = globals()[config.args[0]]
    return int(act(config, agent) or 0)


def finishes(config: WorkerConfig, agent: socket.socket) -> None:
    hello(config, agent)
    say(agent, Finished(worker=config.worker))


def leaves(config: WorkerConfig, agent: socket.socket) -> None:
    say(agent, Left(worker=config.worker, generation=1, iteration=3))


def fails(config: WorkerConfig, agent: socket.socket) -> int:
    say(agent, Failed(worker=config.worker, message="it went wrong", details="where"))
    return 1


def finishes_and_kills_fork_server(config: WorkerConfig, agent: socket.socket) -> None:
    finishes(config, agent)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def fails_and_kills_fork_server(config: WorkerConfig, agent: socket.socket) -> None:
    fails(config, agent)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def exits(config: WorkerConfig, agent: socket.socket) -> None:
    sys.exit(7)


def exits_with_words(config: WorkerConfig, agent: socket.socket) -> None:
    sys.exit("no")


def raises(config: WorkerConfig, agent: socket.socket) -> None:
    raise RuntimeError("unforeseen")


def crashes(config: WorkerConfig, agent: socket.socket) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def waits(config: WorkerConfig, agent: socket.socket) -> None:
    hello(config, agent)
    time.sleep(600)


def floods(config: WorkerConfig, agent: socket.socket) -> None:
    agent.sendall(b"".join(encode(Warned(worker=config.worker, message=f"warning {n}")) for n in range(500)))
    finishes(config, agent)


def mumbles(config: WorkerConfig, agent: socket.socket) -> None:
    agent.sendall(b"what?\n")
    time.sleep(600)


def signs_as_another(config: WorkerConfig, agent: socket.socket) -> None:
    say(agent, WorkerListening(worker=config.worker + 1, host="127.0.0.1", port=1))
    time.sleep(600)


def echoes_an_order(config: WorkerConfig, agent: socket.socket) -> None:
    with agent.makefile("rb") as lines:
        order = to_worker.validate_json(lines.readline())
    assert isinstance(order, Order)
    print(order.generation, order.secret)


def prints(config: WorkerConfig, agent: socket.socket) -> None:
    print("to stdout, at once")
    print("to stderr", file=sys.stderr)
    os.write(1, b"not \xff utf-8\n")
    os.write(1, b"10%\r50%\r100%\n")
    os.write(1, b"x" * 200_000 + b"\n")
    os.write(1, b"no newline at the end")


def describes_itself(config: WorkerConfig, agent: socket.socket) -> None:
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file)
    facts = {
        "descriptors": [d for d in descriptors if os.path.exists(f"/proc/self/fd/{d}")],
        "agent": agent.fileno(),
        "files in memory": {
            d: link for d in descriptors if (link := os.path.realpath(f"/proc/self/fd/{d}")).startswith("/memfd:")
        },
        "stdin": os.readlink("/proc/self/fd/0"),
        "directory": os.getcwd(),
        "color": os.environ.get("COLOR"),
        "hash_seed": os.environ["PYTHONHASHSEED"],
        "hash": hash("resile"),
        "leads_session": os.getsid(0) == os.getpid(),
        "threads": len(os.listdir("/proc/self/task")),
        "ignored": int(status["SigIgn"], 16),
        "caught": int(status["SigCgt"], 16),
        "scratch": os.environ["TMPDIR"],
        "torch": "torch" in sys.modules,
        "time": time.time(),
    }
    print(facts)


def starts_processes(config: WorkerConfig, agent: socket.socket) -> None:
    """Start a child, one in a session of its own, and one that loses its parent; make shared memory; then wait."""
    one = subprocess.Popen(["sleep", "1000"])
    two = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    orphan = subprocess.check_output(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], text=True)
    memory = shared_memory.SharedMemory(create=True, size=100)
    with open(f"{os.environ['TMPDIR']}/left-behind", "w") as file:
        file.write("x")
    print(os.getpid(), one.pid, two.pid, orphan.strip(), memory.name.strip("/"))
    if len(config.args) > 1 and config.args[1] == "and-exits":
        time.sleep(1)  # until the process that removes the memory is itself, not the fork of this one that it begins as
        os._exit(0)
    time.sleep(600)


def leaves_temporary_files(config: WorkerConfig, agent: socket.socket) -> None:
    """Make a temporary folder with a file, print where it is and what is to be shared, and wait."""
    folder = tempfile.mkdtemp()
    with open(f"{folder}/data", "w") as file:
        file.write("x")
    print(folder, os.environ["TORCHINDUCTOR_CACHE_DIR"])
    time.sleep(600)


def leaves_deep_folders(config: WorkerConfig, agent: socket.socket) -> None:
    """Make temporary folders within each other, deeper than a recursive function can go."""
    os.chdir(os.environ["TMPDIR"])
    print(os.getcwd())
    for _ in range(2000):
        os.mkdir("d")
        os.chdir("d")


def leaves_a_daemon(config: WorkerConfig, agent: socket.socket) -> None:
    """Leave a process of a session of its own that has lost its parents, ignores signals and has a child."""
    if "lets-go" in config.args:
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    name = "torch_shm_manager" if "disguised" in config.args else "daemon"
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    shell = f"trap '' TERM INT HUP; echo $$ >&{writer}; exec >/dev/null 2>&1; while :; do sleep 1; done"
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.execvp("sh", ["sh", "-c", shell, name])
        os._exit(0)
    os.waitpid(child, 0)
    print(os.read(reader, 100).decode().strip())


def starts_stubborn_process(config: WorkerConfig, agent: socket.socket) -> None:
    """Leave a child that ignores signals and holds the worker's stdout open."""
    child = subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], start_new_session=True)
    print(child.pid)


def tells_imports(config: WorkerConfig, agent: socket.socket) -> None:
    """Print what the modules of templates are here, the parent, and what is open."""
    names = [name for name in ("harmless_one", "harmless_two", "draws") if name in sys.modules]
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    sockets = [path for path in paths if os.path.lexists(path) and os.readlink(path).startswith("socket:")]
    session = "own" if os.getsid(0) == os.getpid() else "another"
    print(",".join(names), config.template, os.getppid(), session, len(sockets))
    finishes(config, agent)
