"""PCCL (PrimeIntellect-ai/pccl), the nearest peer of the exchange: all-reduces with it, where its package is installed.

Driven by its Python package as its documentation says, as shipped, on 127.0.0.1.
"""

import multiprocessing
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

IN_FLIGHT = 16
CONNECT_ATTEMPTS = 30
"""One a second."""


def is_installed() -> bool:
    return find_spec("pccl") is not None


@contextmanager
def master() -> Iterator[str]:
    """The address of a master, which ends with this block. It decides who is a peer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    ready, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(address, there), daemon=True)
    process.start()
    try:
        ready.recv()
        yield address
    finally:
        process.kill()
        process.join()


def _serve(address: str, ready: Connection) -> None:
    import pccl

    served = pccl.MasterNode(address)
    served.run()
    ready.send(None)
    signal.pause()


class Peer:
    """One of ``num_peers`` processes that all-reduce with PCCL."""

    def __init__(self, address: str, num_peers: int) -> None:
        """Connect to the master at ``address``, and wait until all have."""
        import pccl

        self._pccl: Any = pccl
        self._communicator = pccl.Communicator(address, p2p_connection_pool_size=IN_FLIGHT)
        self._communicator.connect(CONNECT_ATTEMPTS)
        while self._communicator.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < num_peers:
            self._communicator.update_topology()
            time.sleep(0.01)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a float32 tensor over all peers, in place."""
        self._communicator.all_reduce(tensor, tensor, op=self._pccl.ReduceOp.SUM)

    def all_reduce_buckets(self, buckets: Sequence[Tensor]) -> None:
        """Sum float32 tensors over all peers, in place, several at a time."""
        operations = [self._operation(bucket, tag) for tag, bucket in enumerate(buckets)]
        self._communicator.all_reduce_multiple_with_retry(operations, max_in_flight=IN_FLIGHT)

    def _operation(self, bucket: Tensor, tag: int) -> Any:
        pccl = self._pccl
        kind = pccl.DataType.FLOAT
        return pccl.ReduceOpDescriptor.from_torch(
            bucket,
            bucket,
            pccl.ReduceDescriptor(
                count=bucket.numel(),
                op=pccl.ReduceOp.SUM,
                tag=tag,
                operand_descriptor=pccl.ReduceOperandDescriptor(kind),
                quantization_options=pccl.QuantizationOptions(kind, pccl.QuantizationAlgorithm.NONE),
            ),
        )
