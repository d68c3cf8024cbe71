"""What a person with a machine of GPUs runs: `make test-gpu`. It prints a report to attach to an issue.

With ``--dry-run`` the same checks run on a CPU, over gloo, smaller; what a CPU cannot show is listed as skipped.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from resile_learner.collectives.device.bucket_plan import plan_bucket
from resile_learner.collectives.device.communicators import VARIABLE
from resile_learner.collectives.device.summing import fold_rows
from resile_learner.collectives.tree import Interval, fold_values, pieces, ranges

from ..system.running import Outcome, plain, run, run_until
from .report import Report, Skip

HERE = Path(__file__).parent
JOB = HERE / "scripts" / "gpu_job.py"
SIMULATED_JOB = HERE / "scripts" / "simulated_device_job.py"
CASES = {
    "attention": "attention",
    "batchnorm": "BatchNorm, channels_last, fused AdamW",
    "overflow": "fp16 with a GradScaler that overflows",
    "compile": "torch.compile",
    "readers": "two readers",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Setting:
    """Where the checks run."""

    device: str
    num_gpus: int
    home: Path

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"

    @property
    def sizes(self) -> Sequence[int]:
        """Numbers of workers: workers beyond the GPUs share them, and exchange over TCP."""
        return (3,) if self.is_dry else (1, 3, 5, 7, 8)

    def needs_gpus(self, number: int = 1) -> None:
        if self.is_dry:
            raise Skip("dry run: a CPU cannot show it")
        if self.num_gpus < number:
            raise Skip(f"needs {number} GPUs, {self.num_gpus} found")

    def fresh(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.home))

    def run(self, *options: str, args: Sequence[str] = (), notes: Path | None = None) -> Outcome:
        noted = ("--notes", str(notes)) if notes else ()
        return run(JOB, *options, home=self.fresh(), args=("--device", self.device, *noted, *args), seconds=300)


def carrier(outcome: Outcome) -> str:
    """What the sums of a run travelled over."""
    reasons = [line.partition("device to device: ")[2] for line in outcome.errors.splitlines() if "over TCP" in line]
    return f"over TCP: {reasons[0]}" if reasons else "from device to device"


def folds_like_a_cpu(setting: Setting, dtype: torch.dtype) -> str:
    """The fold on the device has the bits of single additions on the CPU, special values included."""
    num_leaves, length = 24, 1 << 16
    held = tuple(pieces(num_leaves, part) for part in ranges(num_leaves, 5))
    plan = plan_bucket(held, num_leaves, length, dtype.itemsize, 0)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(plan.num_rows, plan.num_columns, generator=generator, dtype=torch.float64) * 1e4
    rows[:, :8] = torch.tensor([float("inf"), -0.0, 0.0, 1e-7, -1e-7, 6e-8, 3e38, 65504.0], dtype=torch.float64)
    expected: Sequence[torch.Tensor] = list(rows.to(dtype))
    slots: list[Interval] = [node for each in held for node in each]
    total = fold_values(num_leaves, slots, expected, torch.add)
    on_device = rows.to(dtype).to(setting.device)
    fold_rows(plan, on_device)
    if not torch.equal(on_device[0].cpu().view(torch.uint8), total.view(torch.uint8)):
        wrong = (on_device[0].cpu() != total).sum()
        raise AssertionError(f"{wrong} of {plan.num_columns} sums differ from those of the CPU")
    return f"{plan.num_rows} pieces of {plan.num_columns} elements"


def has_the_same_sha(setting: Setting, case: str) -> str:
    args = ("--case", case)
    expected = plain(JOB, "--device", setting.device, *args)
    carriers = set()
    for size in setting.sizes:
        outcome = setting.run("--workers", str(size), args=args)
        if outcome.sha != expected:
            raise AssertionError(f"{size} workers: {outcome.sha[:12]} instead of {expected[:12]}")
        carriers.add(f"{size} workers {carrier(outcome)}")
    return f"{expected[:12]}; " + "; ".join(sorted(carriers))


def gives_each_worker_another_gpu(setting: Setting) -> str:
    setting.needs_gpus(2)
    notes = setting.fresh()
    number = min(8, setting.num_gpus)
    setting.run("--workers", str(number), notes=notes)
    units = [file.read_text().split()[1] for file in notes.glob("worker-*")]
    if len(set(units)) != number:
        raise AssertionError(f"{number} workers were on {len(set(units))} GPUs")
    return f"{number} workers on {number} GPUs"


def forks_from_a_process_without_a_context(setting: Setting) -> str:
    """While workers train, the process that they were forked from has no device open."""
    watch = subprocess.Popen([sys.executable, "-c", _WATCH], stdout=subprocess.PIPE, text=True)
    setting.run("--workers", "1")
    watch.terminate()
    out, _ = watch.communicate()
    if "fork server" not in out:
        raise AssertionError("no fork server was seen")
    if "nvidia" in out:
        raise AssertionError("the fork server has a CUDA context: forked workers cannot use their GPU")
    return "it has opened no device"


_WATCH = """
import os, time
while True:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"fork_server" in open(f"/proc/{pid}/cmdline", "rb").read():
                links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
                print("fork server", [link for link in links if "nvidia" in link], flush=True)
        except OSError:
            pass
    time.sleep(0.2)
"""


def survives(setting: Setting, strike: str) -> str:
    """A worker is struck in the middle of a backward pass, and the bits stay."""
    size = 3
    notes = setting.fresh()
    expected = plain(JOB, "--device", setting.device)
    outcome = setting.run("--workers", str(size), args=("--strike", strike), notes=notes)
    if not (notes / "struck").exists():
        raise AssertionError("nobody was struck")
    if strike == "oom" and "out of memory" not in outcome.errors:
        raise AssertionError(f"nothing names the error: {outcome.errors[-300:]}")
    if outcome.sha != expected:
        raise AssertionError(f"{outcome.sha[:12]} instead of {expected[:12]}")
    return f"{expected[:12]}, {carrier(outcome)}"


def keeps_its_memory(setting: Setting) -> str:
    changes = 4 if setting.is_dry else 20
    notes = setting.fresh()
    plan = ",".join(f"{1 + 3 * change}:{3 - change % 2}" for change in range(changes))
    outcome = setting.run("--plan", f"0:2,{plan}", args=("--epochs", str(1 + 3 * (changes + 2) // 10)), notes=notes)
    outcome.assert_every_sample_once(epochs=1 + 3 * (changes + 2) // 10)
    oldest = max(notes.glob("worker-*"), key=lambda file: len(file.read_text().splitlines()))
    memory = [int(line.split()[2]) for line in oldest.read_text().splitlines()]
    half = memory[len(memory) // 2]
    note = f"{len(outcome.sizes) - 1} changes; half-way {half >> 20} MiB, at the end {memory[-1] >> 20} MiB"
    if not setting.is_dry and memory[-1] > half * 1.02 + (8 << 20):
        raise AssertionError(note)
    return note


def trains_on_a_simulated_device(setting: Setting) -> str:
    """Gradients arrive on the thread of a device that is not the CPU, and the bits stay when workers come and go."""
    if find_spec("torch_openreg") is None:
        raise Skip("torch_openreg is not installed: see docs/gpus.md")
    home = setting.fresh()
    notes = home / "notes"
    args = ("--notes", str(notes))
    expected = plain(SIMULATED_JOB, *args)
    run_until(SIMULATED_JOB, "iteration 4: checkpoint saved", "--workers", "2", home=home, args=args)
    for options in (("--resume",), ("--workers", "3"), ("--plan", "0:1,4:3,8:2")):
        outcome = run(SIMULATED_JOB, *options, home=home, args=args)
        if outcome.sha != expected:
            raise AssertionError(f"{' '.join(options)}: {outcome.sha[:12]} instead of {expected[:12]}")
        outcome.assert_every_sample_once(epochs=3)
    arrived = notes.read_text().splitlines()
    if set(arrived) != {"device openreg"}:
        raise AssertionError(f"gradients arrived as {sorted(set(arrived))} instead of on the thread of the device")
    return f"{expected[:12]}; {len(arrived)} gradients on the thread of the device"


def is_as_fast_as_ddp(setting: Setting) -> str:
    setting.needs_gpus(2)
    command = [sys.executable, "-m", "tests.gpu.against_ddp", "--gpus", str(min(8, setting.num_gpus))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise AssertionError(done.stderr[-300:])
    return done.stdout.strip()


def checks(setting: Setting) -> dict[str, Callable[[], str]]:
    """All checks by name, the short ones first."""
    names = {
        **{f"fold as on a CPU, {str(kind)[6:]}": partial(folds_like_a_cpu, setting, kind) for kind in DTYPES},
        "distinct GPUs": partial(gives_each_worker_another_gpu, setting),
        "fork server without a CUDA context": partial(forks_from_a_process_without_a_context, setting),
    }
    for case, text in CASES.items():
        names[f"same sha over {', '.join(map(str, setting.sizes))} workers: {text}"] = partial(
            has_the_same_sha, setting, case
        )
    for strike in ("kill", "freeze", "oom"):
        names[f"{strike} in mid-backward"] = partial(survives, setting, strike)
    names["hooks on the thread of PyTorch's simulated device"] = partial(trains_on_a_simulated_device, setting)
    names["memory over 20 resizes"] = partial(keeps_its_memory, setting)
    names["iteration against DDP on NCCL"] = partial(is_as_fast_as_ddp, setting)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, over gloo")
    parser.add_argument("--only", default="", help="checks whose names contain this; the others are listed as skipped")
    parser.add_argument("--report", type=Path, help="write the report to this file too")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("torch finds no GPU here: install a build for your CUDA (README.md), or add --dry-run")
    report = Report(args.dry_run)
    if args.dry_run:
        os.environ[VARIABLE] = "gloo"
    with tempfile.TemporaryDirectory(prefix="resile-gpu-") as home:
        device, number = ("cpu", 0) if args.dry_run else ("cuda", torch.cuda.device_count())
        for name, check in checks(Setting(device, number, Path(home))).items():
            report.check(name, check if args.only in name else partial(_left_out, args.only))
    print("\n" + report.text())
    if args.report:
        args.report.write_text(report.text() + "\n")
    return int(report.has_failed)


def _left_out(only: str) -> str:
    raise Skip(f"left out by --only {only}")


if __name__ == "__main__":
    sys.exit(main())
