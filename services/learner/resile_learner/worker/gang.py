"""A worker of a gang: it runs a script that knows nothing of Resile, as torchrun would.

It needs no control thread, links or membership: it reports its address, waits for the order with the addresses of all,
sets the variables that ``torch.distributed`` reads, and runs the script.
"""

import os
import socket
import sys
import threading
from typing import NoReturn

import torch

from ..messages import (
    Completed,
    Failed,
    Finished,
    GangPlace,
    Joined,
    Message,
    Order,
    Switched,
    WorkerConfig,
    WorkerListening,
)
from .agent_connection import AgentConnection
from .failure import failed, raised
from .script import finish_script, run_script

BITS = "not promised: a gang's script trains by itself"


def run_in_gang(config: WorkerConfig, place: GangPlace, agent: socket.socket) -> NoReturn:
    """Run the script of ``config`` as the worker at ``place``, and end the process.

    The outcome is reported to the agent at the other end of ``agent``.
    """
    connection = AgentConnection(agent)
    with _reserve_port(config.host) as reserved:
        port = reserved.getsockname()[1]
        connection.send(WorkerListening(worker=config.worker, host=config.host, port=port))
        order = connection.wait_for_order(config.worker)
        threading.Thread(target=connection.obey, name="resile-agent", daemon=True).start()
        _set_variables(order, place)
        connection.send(_started(config, place, order))
        outcome = _run_script(config)
        if isinstance(outcome, Finished):
            finish_script()
            if place.rank == 0:
                connection.send(_completed(config, order))
        connection.send(outcome)
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(isinstance(outcome, Failed)))


def _reserve_port(host: str) -> socket.socket:
    """Bind a free port of ``host``, on which the store of ``torch.distributed`` can listen while this is open.

    It does not listen itself: a worker that connects too early is refused, and tries again.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def _set_variables(order: Order, place: GangPlace) -> None:
    first = order.members[0]
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
        MASTER_ADDR=first.host,
        MASTER_PORT=str(first.port),
    )
    if first.host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def _started(config: WorkerConfig, place: GangPlace, order: Order) -> Message:
    if place.rank == 0:
        return Switched(worker=config.worker, generation=order.generation, workers=order.workers, iteration=0)
    return Joined(worker=config.worker, generation=order.generation, iteration=0)


def _run_script(config: WorkerConfig) -> Finished | Failed:
    try:
        run_script(config)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            return failed(config, f"the script ended itself: sys.exit({leaving.code!r})")
    except BaseException as error:
        return raised(config, error)
    return Finished(worker=config.worker)


def _completed(config: WorkerConfig, order: Order) -> Completed:
    return Completed(
        worker=config.worker,
        generation=order.generation,
        iteration=0,
        epoch=0,
        samples_seen=0,
        loss=None,
        metrics={},
        validation={},
        params_sha256="",
        model=None,
        ledger=(),
        bits=BITS,
    )
