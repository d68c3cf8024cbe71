"""The hand-written loop: the user's own training step, made elastic.

It reads as any training loop does::

    loop = ElasticLoop(model, optimizer, dataset, epochs=3, batch_size=192)
    for iteration in loop:
        for inputs, targets in iteration.shards():
            iteration.backward(F.cross_entropy(model(inputs), targets))
        if iteration.exchange():
            optimizer.step()
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.reports import BatchRange

from ..checkpoint.checkpointer import Checkpointer
from ..collectives.tree import ranges
from ..messages import Ready
from ..session import Session, View, current_session
from ..state.optimizer import OptimizerState
from ..state.run import RunState, Stateful
from .averages import AverageWatch
from .batch_schedule import BatchSchedule
from .batches import Batch, Position, default_num_shards
from .body_watch import BodyWatch
from .buffers import Buffers
from .determinism import Determinism, Reproducibility, deterministic
from .digest import RollingDigest, params_sha256
from .fetch import Collate, Fetched, Fetcher, ShardKey, checked_dataset
from .gradients import Gradients
from .iteration import Iteration
from .learning_rate import LearningRateRule, LearningRateScale
from .ledger import Ledger
from .noise import NOISE_EVERY, NoiseScale
from .optimizer_watch import OptimizerWatch
from .protocol import TrainingProtocol
from .repeatability import COMPARED_ITERATIONS, is_compared_in_epoch
from .reports import Result
from .rounds import Rounds
from .samplers import Sampler, order_digest, planned
from .scalers import prepared_scalers
from .schedules import check_schedules
from .seeds import mix, seed_all
from .settings import Mode, TrainingSettings, facts_of
from .torch_settings import check_unchanged, script_settings
from .validation import Validation, Validator


class ElasticLoop:
    """Iterates over the committed iterations of a run, on however many workers it has at the moment.

    ``dataset`` is map-style. ``batch_size`` is the global batch, always cut into ``num_shards`` shards (None: the
    largest of 24, 12, 8, 6, 4, 2, 1 that leaves at least 8 samples in a shard). ``batch_range``, the least and the most
    samples, lets the pool change the global batch between iterations; ``learning_rate_rule`` says how learning rates
    follow it ("linear", "sqrt" or "none"), relative to ``batch_size``. ``state`` names further objects with
    ``state_dict`` and ``load_state_dict`` that belong to the run's state, such as a learning-rate schedule or a
    GradScaler. ``validation`` is computed at the end of each epoch. ``checkpoint_every`` counts iterations, or is a
    time such as "5 min". ``threads`` are torch's threads in each worker. Without ``shuffle`` every epoch has the order
    of the dataset; ``drop_last`` leaves out samples that do not fill a global batch. ``sampler`` draws the indices of
    each epoch instead (see `SamplerOrder`). ``max_iterations`` ends the run earlier than
    ``epochs`` do. Raises UsageError for settings that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        dataset: Any,
        *,
        epochs: int = 1,
        batch_size: int = 64,
        batch_range: tuple[int, int] | None = None,
        learning_rate_rule: LearningRateRule = "linear",
        num_shards: int | None = None,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
        validation: Validation | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        checkpoint_every: int | str | None = None,
        mode: Mode = "same-bits",
        threads: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Sampler | None = None,
        max_iterations: int | None = None,
    ) -> None:
        shards = default_num_shards(batch_size) if num_shards is None else num_shards
        self._settings = TrainingSettings(
            epochs, batch_size, shards, seed, mode, threads, shuffle, drop_last, batch_range, learning_rate_rule
        )
        num_samples = len(checked_dataset(dataset, name="training"))
        self.plan = planned(
            num_samples, batch_size, shards, seed=seed, shuffle=shuffle, drop_last=drop_last, sampler=sampler
        )
        self._more_settings: dict[str, object] = {"sampler": order_digest(self.plan), "max_iterations": max_iterations}
        self._max_iterations = max_iterations
        self.bits = Reproducibility(mode)
        self._session: Session = current_session()
        if batch_range:
            replace(self.plan, batch_size=batch_range[1])  # refuses a batch that cannot be carried out later
        declared = BatchRange(least=batch_range[0], most=batch_range[1]) if batch_range else None
        self._schedule = BatchSchedule(batch_size, declared, replayed=self._session.batches)
        self._phases = self._session.phases
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._dataset = dataset
        self._entered = False
        self._determinism: Determinism
        self._torch_settings: dict[str, str]
        self._parameters = list(model.parameters())
        self._fetcher = Fetcher(dataset, seed=seed, collate_fn=collate_fn, num_workers=num_workers)
        self._stream: Iterator[Fetched] | None = None
        self._gradients = _gradients_of(self._optimizers, self._parameters)
        self._noise = NoiseScale()
        self._buffers = Buffers(model)
        self._digest = RollingDigest(self._parameters)
        self._averages = AverageWatch(model, state or {})
        self._body = BodyWatch(model, self._optimizers, state or {})
        self._open: Iteration | None = None
        self._num_begun = 0
        self._last_members: tuple[int, ...] = ()
        """Those of the newest iteration that was committed on this worker."""
        self._checkpoints = Checkpointer(self._session, every=checkpoint_every)
        self._validator = (
            Validator(validation, model, batch_size=batch_size, num_shards=shards, seed=seed) if validation else None
        )
        # With a batch that changes, iterations may become more than a schedule was made for.
        self._schedules = () if batch_range else tuple((state or {}).values())
        self._watches = [OptimizerWatch(model, each, state or {}) for each in self._optimizers]
        if batch_range:
            for each in self._optimizers:
                LearningRateScale(each, learning_rate_rule, lambda: self.plan.batch_size / batch_size)
        self._scalers = prepared_scalers(state or {}, self._parameters)
        ledger = Ledger(num_samples)
        parts: dict[str, Stateful] = {
            "optimizer": OptimizerState(self._optimizers[0]),
            "ledger": ledger,
            "reproducibility": self.bits,
            "steps": self._watches[0],
            "batches": self._schedule,
            "noise": self._noise,
        }
        for number, each in enumerate(self._optimizers[1:], start=1):
            parts |= {f"optimizer {number}": OptimizerState(each), f"steps {number}": self._watches[number]}
        if self._validator:
            parts["validation"] = self._validator
        self._state = RunState(model, parts, state or {}, after_load=self._buffers.adopt)
        self._choose_batch()
        self._protocol = TrainingProtocol(
            self._session,
            _Computation(self),
            self._state,
            ledger=ledger,
            rounds=Rounds(self._session, self._buffers),
            checkpoints=self._checkpoints,
            schedule=self._schedule,
            validator=self._validator,
        )

    @property
    def epochs(self) -> int:
        """The number of passes over the dataset."""
        return self._settings.epochs

    @property
    def iteration(self) -> int:
        """Iterations committed so far: the number of the next one."""
        return self._state.progress.iteration

    @property
    def iterations_total(self) -> int:
        """The number of iterations after which the run ends; an estimate if the batch may change."""
        return self._state.progress.iterations_total

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self._state.progress.epoch

    @property
    def loss(self) -> float | None:
        """The loss of the last committed iteration, over its global batch; None before the first."""
        return self._state.progress.loss

    @property
    def result(self) -> Result | None:
        """How the run ended; None before its end."""
        return self._protocol.result

    @property
    def validation(self) -> Mapping[str, float]:
        """The scores of the last validation that was completed."""
        return self._state.progress.validation

    @property
    def is_lowest_rank(self) -> bool:
        """Whether this worker is, at the moment, the one that reports and writes files."""
        return self._session.view.rank == 0

    def require_equal(self, **settings: object) -> None:
        """Before the loop: name further settings of the script that must be equal on all workers of the run."""
        self._more_settings |= settings

    def stop(self) -> None:
        """End the run after this iteration. All workers must decide so at the same one.

        Judge by the reduced loss or metrics.
        """
        self._state.progress.iterations_total = self.iteration + 1

    def __iter__(self) -> Iterator[Iteration]:
        if self._entered:
            raise UsageError(
                "this loop has run already: a script has one training call; raise `epochs` to train longer"
            )
        self._entered = True
        with ExitStack() as stack:
            self._determinism = stack.enter_context(deterministic(self.bits, threads=self._settings.threads))
            self._torch_settings = script_settings()
            stack.callback(self._checkpoints.close)
            stack.enter_context(self._averages.watch_updates(self._may_update))
            self._state.facts = facts_of(
                self._settings,
                {**self._more_settings, "packages": self._session.packages},
                model=self._model,
                dataset=self._dataset,
                num_validation_samples=self._validator.num_samples if self._validator else 0,
            )
            self._prewarm()
            try:
                yield from self._protocol.run(self._ready(), self._iterate)
            except ResileError as error:
                self._session.failure = error
                raise

    def _ready(self) -> Ready:
        return Ready(
            worker=0,
            iterations_total=self.iterations_total,
            num_shards=self.plan.num_shards,
            batch_size=self._settings.batch_size,
            batch_range=None if self._session.batches else self._schedule.batch_range,
            epochs=self.epochs,
            samples=self.plan.num_samples,
            bits=str(self.bits),
        )

    def _prewarm(self) -> None:
        """As a joiner, touch memory while the others still train without this worker, not while they wait for it."""
        expected = self._session.expected
        if expected:
            num_shards = expected.size if self._settings.mode == "fast" else self.plan.num_shards
            for gradients, optimizer in zip(self._gradients, self._optimizers, strict=True):
                gradients.begin(num_shards, ranges(num_shards, expected.size)[expected.rank])
                _prewarm_optimizer(optimizer)

    def _iterate(self) -> Iterator[Iteration]:
        self._check_unchanged()
        view = self._session.view
        self._choose_batch(ordered=view.batch_size)
        batch = self._batch(self._position)
        is_compared = self._compares_first_shard(view)
        self._averages.begin_iteration(self._num_begun)
        self._body.begin_iteration(is_compared=is_compared)
        self._buffers.adopt_changed()
        self._num_begun += 1
        turn = self._state.progress.turn
        self._open = iteration = Iteration(
            self.iteration,
            batch,
            batch.held_by(view.rank, view.size),
            seed=self._settings.seed,
            fetch=self._next_shard,
            fetch_spare=lambda: self._fetcher.read(ShardKey(batch.epoch, batch.shard(0))),
            gradients=self._gradients[turn],
            buffers=self._buffers,
            rounds=self._protocol.rounds,
            phases=self._phases,
            scalers=self._scalers,
            determinism=self._determinism,
            header=self._protocol.header(next_iteration=self.iteration + 1, facts=self._round_facts()),
            last=self._protocol.reports.last,
            measures_noise=self._schedule.batch_range is not None and self.iteration % NOISE_EVERY == 0,
            turn=turn,
            num_turns=self._num_turns,
            is_compared=is_compared,
            watch=self._body,
        )
        steps = self._watches[turn].steps
        self._phases.enter("callback")
        yield iteration
        self._phases.enter("waiting")
        iteration.raise_refusal()
        may_skip = bool(self._scalers) or iteration.outcome is None
        self._watches[turn].check_steps(before=steps, is_lost=iteration.lost is not None, may_skip=may_skip)
        if iteration.lost:
            raise iteration.lost
        if iteration.outcome is None:
            raise UsageError(
                "the body of the loop ended without iteration.exchange(): call it once, after the last shard"
            )
        if iteration.norms:
            self._noise.add(iteration.norms, num_samples=len(batch.indices), num_shards=batch.num_shards)
        self._last_members = view.workers
        self._protocol.commit(
            batch,
            iteration.outcome,
            loss=iteration.loss,
            metrics=iteration.metrics,
            noise_scale=self._noise.value,
            num_turns=self._num_turns,
        )

    def _compares_first_shard(self, view: View) -> bool:
        """Whether all workers compute the first shard of the next iteration: seldom, and when workers changed."""
        if self._settings.mode == "fast":
            return False
        starts = self._position.sample == 0 and is_compared_in_epoch(self._position.epoch)
        return starts or self.iteration // self._num_turns in COMPARED_ITERATIONS or view.workers != self._last_members

    def _round_facts(self) -> dict[str, str]:
        """What the script may have changed since the last exchange, alike on all workers."""
        options = repr(self._body.options()).encode()
        return {"optimizer_options": f"{crc32(options):x}", "buffers": f"{self._buffers.digest(self.iteration):x}"}

    def _may_update(self) -> bool:
        return self._open is None or self._open.outcome is not None

    def _check_unchanged(self) -> None:
        """Refuse what a joining worker could not know, and schedules that count other steps than they get."""
        if self._settings.mode == "same-bits":
            check_unchanged(self._torch_settings)
        for watch in self._watches:
            watch.check()
        check_schedules(
            self._schedules, epochs=self.epochs, iteration=self.iteration, iterations_total=self.iterations_total
        )

    def _choose_batch(self, *, ordered: int | None = None) -> None:
        """Begin the next iteration: find out how many samples it has, and how many iterations there will be."""
        size = self._schedule.next(self.iteration, ordered=ordered)
        if size != self.plan.batch_size:
            self.plan = replace(self.plan, batch_size=size)
            self._stream = None
        progress = self._state.progress
        end = self._schedule.iterations_total(self.iteration, self.plan, self._position, epochs=self.epochs)
        num_batches = end - self.iteration
        total = self.iteration + num_batches * self._num_turns - progress.turn
        progress.iterations_total = min(total, self._max_iterations or total)

    @property
    def _num_turns(self) -> int:
        """The iterations of each batch: one for each optimizer."""
        return len(self._optimizers)

    @property
    def _position(self) -> Position:
        return Position(self._state.progress.epoch, self._state.progress.sample)

    def _batch(self, position: Position) -> Batch:
        return self.plan.batch(position, num_shards=self._session.view.size if self._settings.mode == "fast" else None)

    def _next_shard(self) -> Fetched:
        if self._stream is None:
            self._stream = self._fetcher.stream(self._upcoming())
        return next(self._stream)

    def _upcoming(self) -> Iterator[ShardKey]:
        """This worker's shards from here to the end, for as long as the membership stays; a change starts a new one."""
        view, position, turn = self._session.view, self._position, self._state.progress.turn
        while position.epoch < self.epochs:
            batch = self._batch(position)
            for _ in range(turn, self._num_turns):
                for leaf in range(*batch.held_by(view.rank, view.size)):
                    yield ShardKey(batch.epoch, batch.shard(leaf))
            position, turn = batch.next, 0


class _Computation:
    """What the protocol needs of a loop that trains a model: see `Computation`."""

    def __init__(self, loop: ElasticLoop) -> None:
        self._loop = loop
        self.model = loop._model

    @property
    def reproducibility(self) -> str:
        return str(self._loop.bits)

    def digest(self, round_: int) -> int:
        return self._loop._digest.at(round_) ^ mix(
            "steps", *(watch.steps for watch in self._loop._watches), self._loop._schedule.current
        )

    def discard_round(self) -> None:
        self._loop._buffers.restore()

    def begin_membership(self) -> None:
        self._loop._stream = None

    def begin_iteration(self, iteration: int) -> None:
        seed_all(mix(self._loop._settings.seed, "between", iteration))

    def params_sha256(self) -> str:
        return params_sha256(self.model)


def _gradients_of(optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor]) -> list[Gradients]:
    """The gradients that each optimizer steps with: with a single one, those of all trainable parameters."""
    if len(optimizers) == 1:
        return [Gradients([parameter for parameter in parameters if parameter.requires_grad])]
    order = {id(parameter): index for index, parameter in enumerate(parameters)}
    result = []
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = [parameter for parameter in held if parameter.requires_grad and id(parameter) in order]
        result.append(Gradients(sorted(held, key=lambda parameter: order[id(parameter)])))
    return result


def _prewarm_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Take one step with a copy of ``optimizer`` on gradients of zero, and discard the copy.

    It leaves this process with memory for the optimizer's state and for gradients, which can take longer to touch for
    the first time than the state takes to arrive, and with code loaded that PyTorch loads at a first step. Only
    PyTorch's own optimizers are known to be copied without side effects, and only on the CPU is freed memory reused.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not type(optimizer).__module__.startswith("torch.") or any(p.device.type != "cpu" for p in parameters):
        return
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with suppress(TypeError):  # LBFGS needs a closure
        twin.step()
