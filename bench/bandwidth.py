"""How fast bytes go from one process to another over a loopback socket: what a link can carry."""

import os
import socket
import time

CHUNK_BYTES = 1 << 20
NUM_BYTES = 1 << 30
BUFFER_BYTES = 1 << 28


def loopback_bytes_per_second() -> float:
    """Copy a gigabyte out of one process's memory and into another's, both touched before."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = os.fork()
        if receiver == 0:
            try:
                _receive(listener.getsockname())
            finally:
                os._exit(0)
        connection, _ = listener.accept()
    source = memoryview(bytearray(os.urandom(CHUNK_BYTES)) * (BUFFER_BYTES // CHUNK_BYTES))
    with connection:
        connection.recv(1)  # it is ready
        begun = time.perf_counter()
        for start in range(0, NUM_BYTES, CHUNK_BYTES):
            at = start % BUFFER_BYTES
            connection.sendall(source[at : at + CHUNK_BYTES])
        connection.recv(1)  # it has everything
        seconds = time.perf_counter() - begun
    os.waitpid(receiver, 0)
    return NUM_BYTES / seconds


def _receive(address: tuple[str, int]) -> None:
    target = memoryview(bytearray(b"\1") * BUFFER_BYTES)
    with socket.create_connection(address) as connection:
        connection.sendall(b"r")
        received = 0
        while received < NUM_BYTES:
            at = received % BUFFER_BYTES
            received += connection.recv_into(target[at : at + CHUNK_BYTES])
        connection.sendall(b"d")
