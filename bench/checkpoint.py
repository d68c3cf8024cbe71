"""What a checkpoint costs: the pause for its snapshot, and its upload against a bare `obstore.put` of the same bytes.

    python bench/checkpoint.py [--quick | --tiny]

To a folder, and to a real S3 server on this machine. Both sides take turns, so what else the machine does hits both.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from obstore.store import from_url
from report import Target, argument_parser, conclude, print_table

from resile.chaos.s3_server import S3Server
from resile_learner.checkpoint.manifest import CheckpointId, PartTracker
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.checkpoint.store import CheckpointStore
from resile_learner.checkpoint.uploads import Uploads
from resile_learner.state.flat import FlatState, flatten

SLOWEST_UPLOAD = 1 / 0.8


def state(parameters: int) -> FlatState:
    """A model with AdamW's moments: 12 bytes for each parameter."""
    layers = [torch.randn(parameters // 10) for _ in range(10)]
    moments = [{"exp_avg": torch.randn_like(layer), "exp_avg_sq": torch.rand_like(layer)} for layer in layers]
    return flatten({"model": layers, "optimizer": moments})


def pauses(flat: FlatState, turns: int) -> tuple[list[float], list[float], Snapshot]:
    """Seconds for which training stands still, into memory that was used before; and those of a bare copy."""
    snapshot = Snapshot(flat)
    copies = [torch.empty_like(tensor).copy_(tensor) for tensor in flat.tensors]
    own, bare = [], []
    for _ in range(turns):
        snapshot.release()
        begun = time.perf_counter()
        snapshot = Snapshot(flat, reuse=snapshot)
        own.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for copy, tensor in zip(copies, flat.tensors, strict=True):
            copy.copy_(tensor)
        bare.append(time.perf_counter() - begun)
    return own, bare, snapshot


def upload(uploads: Uploads, snapshot: Snapshot, checkpoint: CheckpointId) -> float:
    """Seconds from the snapshot to the manifest, on one worker."""
    tracker = PartTracker(checkpoint.name, snapshot.num_parts)
    begun = time.perf_counter()
    uploads.start(snapshot, checkpoint)
    uploads.assign(tracker.missing(0, 1))
    while not tracker.complete:
        for name, part in uploads.stored():
            tracker.add(name, part)
        time.sleep(0.002)
    uploads.commit(tracker.parts)
    while not uploads.committed():
        time.sleep(0.002)
    seconds = time.perf_counter() - begun
    uploads.finish(checkpoint)
    return seconds


def compared(url: str, flat: FlatState, turns: int) -> tuple[list[float], list[float]]:
    """Seconds of an upload, and of a bare put of the same bytes to the same storage."""
    snapshot = Snapshot(flat)
    content = np.concatenate(
        [np.frombuffer(view, np.uint8) for k in range(snapshot.num_parts) for view in snapshot.part(k)]
    )
    bare_store = (
        from_url(url, mkdir=True) if url.startswith("file:") else from_url(url, client_options={"allow_http": True})
    )
    uploads = Uploads(CheckpointStore(url), job="bench", keep=1)
    own, bare = [], []
    for turn in range(turns + 1):
        sides: list[tuple[list[float], Callable[[], float]]] = [
            (own, lambda turn=turn: upload(uploads, Snapshot(flat), CheckpointId(1, turn, 1))),
            (bare, lambda: timed(lambda: bare_store.put("bare", memoryview(content)))),
        ]
        for seconds, measure in sides[:: 1 if turn % 2 else -1]:
            seconds.append(measure())
    uploads.close(wait=True)
    return own[1:], bare[1:]  # the first turn opens connections and makes files


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@contextmanager
def stores(folder: Path) -> Iterator[dict[str, str]]:
    """URLs of the storages, by name."""
    server = S3Server(folder / "s3")
    os.environ.update(server.environment)
    try:
        server.start()
        yield {"file": (folder / "files").as_uri(), "s3": server.url + "/bench"}
    finally:
        server.kill()


def main() -> None:
    length = argument_parser(__doc__).parse_args().length
    parameters, turns = length.pick(full=(100_000_000, 7), quick=(10_000_000, 5), tiny=(100_000, 1))
    torch.set_num_threads(1)
    flat = state(parameters)
    own, bare, snapshot = pauses(flat, turns)
    megabytes = snapshot.num_bytes / 1e6
    title = f"{parameters / 1e6:g} M parameters, {megabytes:.0f} MB: the pause for a snapshot"
    pause, copy = statistics.median(own), statistics.median(bare)
    print_table(title, ("side", "ms", "GB/s"), [row("snapshot", pause, megabytes), row("bare copy", copy, megabytes)])
    targets = [Target("pause for a snapshot, by a bare copy", pause / copy, 1.10)]
    rows = []
    with tempfile.TemporaryDirectory() as folder, stores(Path(folder)) as urls:
        for name, url in urls.items():
            own, bare = compared(url, flat, turns)
            mine, theirs = statistics.median(own), statistics.median(bare)
            rows.append((name, f"{megabytes / mine:.0f}", f"{megabytes / theirs:.0f}", f"{theirs / mine:.2f}"))
            targets.append(Target(f"upload to {name}, by a bare put", mine / theirs, SLOWEST_UPLOAD))
    print_table("Upload by one worker", ("storage", "Resile MB/s", "bare put MB/s", "throughput ratio"), rows)
    conclude(targets, length)


def row(name: str, seconds: float, megabytes: float) -> tuple[str, str, str]:
    return name, f"{1e3 * seconds:.1f}", f"{megabytes / 1e3 / seconds:.2f}"


if __name__ == "__main__":
    main()
