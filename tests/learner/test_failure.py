"""What a worker says of its failure is one line with its place, and tells want of memory from other errors."""

import signal
import threading
from pathlib import Path

import pytest
import torch

from resile_learner.messages import WorkerConfig
from resile_learner.processes.exits import classify
from resile_learner.session import StateLost
from resile_learner.worker.failure import raised, stalled
from resile_learner.worker.failure_detection import Stall
from resile_shared.errors import UsageError
from resile_shared.messages.hosts import WorkerExit

CONFIG = WorkerConfig(job="job-1", worker=3, script=__file__, directory="/", storage="file:///none")


def test_an_error_is_told_in_one_line_with_its_place() -> None:
    with pytest.raises(ValueError, match="two") as caught:
        raise ValueError("two\nlines")
    failed = raised(CONFIG, caught.value)
    assert failed.message.startswith("ValueError: two lines (test_failure.py, line ")
    assert "Traceback (most recent call last)" in failed.details


def test_a_refusal_of_the_script_says_so_with_its_line() -> None:
    with pytest.raises(UsageError) as caught:
        raise UsageError("the loss is a sum")
    refused = raised(CONFIG, caught.value)
    assert refused.message.startswith("the loss is a sum (test_failure.py, line ")
    assert refused.is_refusal
    assert classify(1, refused, memory_ran_out=False).is_refusal
    assert not raised(CONFIG, ValueError("other")).is_refusal


class Faulty(torch.utils.data.Dataset[int]):
    """Raises an error of two lines in a process of a DataLoader."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise KeyError("label") if index else ValueError("two\n  lines")


@pytest.mark.parametrize(("first", "reason"), [(0, "ValueError: two lines"), (1, "KeyError: 'label'")])
def test_an_error_of_a_data_loader_is_told_by_its_own_reason_and_line(first: int, reason: str) -> None:
    loader = torch.utils.data.DataLoader(Faulty(), sampler=[first], num_workers=1)
    with pytest.raises((ValueError, KeyError)) as caught:
        next(iter(loader))
    failed = raised(CONFIG, caught.value)
    line = Faulty.__getitem__.__code__.co_firstlineno + 1
    assert failed.message == f"{reason} (test_failure.py, line {line}), in DataLoader worker process 0"
    assert "Original Traceback" in failed.details


def test_want_of_shared_memory_is_told_with_its_size_and_remedy() -> None:
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
                         "workers are out of shared memory.")  # fmt: skip
    message = raised(CONFIG, error).message
    assert "are in /dev/shm, which has " in message
    assert "--shm-size" in message
    full = RuntimeError("unable to write to file </torch_12_34_5>: No space left on device (28)")
    assert "--shm-size" in raised(CONFIG, full).message
    assert "--shm-size" in WorkerExit(kind="killed", status=-signal.SIGBUS).describe("worker 3")
    assert "--shm-size" not in WorkerExit(kind="killed", status=-signal.SIGSEGV).describe("worker 3")


class Loop:
    """A loop in the middle of an iteration."""

    missing_gradients = "gradients come later"

    def complete_if_left(self) -> None:
        raise AssertionError

    complete = complete_if_left


def test_gradients_that_are_not_there_yet_are_told_with_the_remedy_of_the_loop() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(AttributeError) as caught:
        parameter.grad.norm()  # type: ignore[union-attr]
    assert raised(CONFIG, caught.value, loop=Loop()).message.endswith("; gradients come later")
    with pytest.raises(ValueError, match="empty") as empty:
        max(each.grad for each in [parameter] if each.grad is not None)
    assert raised(CONFIG, empty.value, loop=Loop()).message.endswith("; gradients come later")
    with pytest.raises(AttributeError) as caught:
        None.norm()  # type: ignore[attr-defined]
    assert "come later" not in raised(CONFIG, caught.value, loop=Loop()).message


def test_an_error_that_has_nothing_to_do_with_gradients_has_no_such_remedy() -> None:
    with pytest.raises(KeyError) as caught:
        {}["clip_grad_norm"]
    assert "come later" not in raised(CONFIG, caught.value, loop=Loop()).message


def test_files_that_several_workers_write_are_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "new.pt").replace(tmp_path / "last.pt")
    (tmp_path / "cut.pt").write_bytes(b"PK\3\4 cut off")
    with pytest.raises(RuntimeError) as cut:
        torch.load(tmp_path / "cut.pt")
    for error in (missing.value, cut.value):
        message = raised(CONFIG, error, num_workers=2).message
        assert "all workers run this line" in message
        assert message.endswith("as in `if loader.is_lowest_rank:`")
        assert "all workers" not in raised(CONFIG, error, num_workers=1).message
    with pytest.raises(ConnectionRefusedError) as refused:
        raise ConnectionRefusedError(111, "Connection refused")
    assert "all workers" not in raised(CONFIG, refused.value, num_workers=2).message


def test_that_no_member_has_the_state_is_no_fault_of_the_script() -> None:
    assert raised(CONFIG, StateLost()).is_state_lost


def test_want_of_memory_is_told_with_what_helps() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    for error in (caught.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        assert raised(CONFIG, error).message.endswith("memory ran out: fewer workers or a smaller batch need less")


def test_who_is_stuck_shows_the_stack_of_its_main_thread() -> None:
    said = []
    watching = threading.Thread(target=lambda: said.append(stalled(CONFIG, Stall("data", 70.0, 0.5))))
    watching.start()
    watching.join()
    assert said[0].message.startswith("stuck in data for 70 s; it took at most 0.5 s before (test_failure.py, line ")
    assert "watching" in said[0].details
