"""Loops whose outcome would depend on which batches a worker computes are refused by name; right ones train."""

import copy
import random
from collections.abc import Callable
from contextvars import Context
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, Subset

from resile.training import ElasticLoader, ElasticLoop, seed
from resile_learner.lone_training import StartedSeveralTimes, check_not_started_several_times
from resile_learner.session import View
from resile_learner.state.facts import MembersDiffer, check_members_agree
from resile_learner.training.digest import dataset_digest
from resile_learner.training.watch.averages import AverageWatch
from resile_learner.training.watch.carried_state import CarriedState
from resile_learner.training.watch.joint_rows import COMPARED_AT
from resile_learner.training.watch.losses import LossIsASum, LossIsDivided
from resile_learner.training.watch.repeatability import (
    NewMembers,
    NotRepeatable,
    ShardFingerprint,
    check_fingerprints,
    is_compared_in_epoch,
    is_compared_iteration,
)
from resile_shared.errors import UsageError

from .shard_bodies import prepare

SHARDS = 2


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """32 samples, with noise that ``draw`` gives."""

    def __init__(self, draw: Callable[[], float] = lambda: 0.0) -> None:
        self.x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        self._draw = draw

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self._draw(), (self.x[index].sum() > 0).long()


class Body:
    """An ordinary loop with a place for a mistake."""

    def __init__(self, model: nn.Module | None = None, dataset: Any = None, **options: Any) -> None:
        seed(0)
        self.model = nn.Linear(4, 2) if model is None else model
        self.dataset = Samples() if dataset is None else dataset
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.options = options
        self.batches = 0
        self.loader: Any = None

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs), targets)

    def after_step(self) -> None:
        """What comes after the update, in each batch."""

    def train(self, *, epochs: int = 3, num_shards: int | None = SHARDS) -> str:
        def run() -> str:
            loader = DataLoader(self.dataset, batch_size=8)
            _, _, self.loader = prepare(self.model, self.optimizer, loader, num_shards=num_shards, **self.options)
            for _ in self.loader.epochs(epochs):
                for inputs, targets in self.loader:
                    self.batches += 1
                    self.optimizer.zero_grad()
                    self.loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
                    self.optimizer.step()
                    self.after_step()
            assert isinstance(self.loader, ElasticLoader)
            assert self.loader.result
            return self.loader.result.params_sha256

        sha = Context().run(run)
        assert isinstance(sha, str)
        return sha


GENERATORS: dict[str, Callable[[], Callable[[], float]]] = {
    "torch": lambda: (lambda own: lambda: float(torch.rand((), generator=own)))(torch.Generator().manual_seed(3)),
    "numpy": lambda: np.random.default_rng(3).random,
    "python": lambda: random.Random(3).random,
    "counter": lambda: iter(range(1_000_000)).__next__,
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_dataset_that_draws_from_a_generator_of_its_own_is_refused(kind: str) -> None:
    with pytest.raises(NotRepeatable, match=r"the dataset .* gives other samples when the same shard .* is read again"):
        Body(dataset=Samples(GENERATORS[kind]())).train()


def test_a_dataset_that_draws_from_the_global_generators_trains() -> None:
    draws = lambda: random.random() + np.random.random() + float(torch.rand(()))  # noqa: E731
    assert Body(dataset=Samples(draws)).train() == Body(dataset=Samples(draws)).train()


class Noisy(nn.Module):
    """A linear layer with noise from a generator of its own."""

    def __init__(self, generator: Any, *, reseeds: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.generator = generator
        self.reseeds = reseeds

    def forward(self, inputs: Tensor) -> Tensor:
        if self.reseeds:
            self.generator.manual_seed(5)
        if isinstance(self.generator, torch.Generator):
            return self.layer(inputs + torch.randn(inputs.shape, generator=self.generator))
        return self.layer(inputs + self.generator.random())


@pytest.mark.parametrize("generator", [torch.Generator(), np.random.default_rng(0), random.Random(0)])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_model_that_draws_from_a_generator_of_its_own_is_refused(generator: Any, num_shards: int) -> None:
    with pytest.raises(NotRepeatable, match=r"draws from a generator of its own, model\.generator"):
        Body(Noisy(generator)).train(num_shards=num_shards)


@pytest.mark.parametrize("generator", [torch.default_generator, torch.Generator()])
def test_a_generator_that_is_seeded_for_each_batch_is_no_mistake(generator: torch.Generator) -> None:
    Body(Noisy(generator, reseeds=generator is not torch.default_generator)).train()


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_backward_pass_that_draws_from_a_generator_of_its_own_is_refused(num_shards: int) -> None:
    model = Noisy(torch.default_generator)
    model.noise = torch.Generator()
    model.layer.weight.register_hook(lambda grad: grad + torch.randn(grad.shape, generator=model.noise))
    with pytest.raises(NotRepeatable, match=r"draws from a generator of its own, model\.noise"):
        Body(model).train(num_shards=num_shards)


class OwnNoise:
    """A part of the state that holds a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class DrawsInUpdates(Body):
    """Noise of the gradients, after the exchange, from a generator that the model holds."""

    def __init__(self, *, is_kept: bool = False, **options: Any) -> None:
        super().__init__(**options)
        noise = OwnNoise()
        self.model.noise = noise.generator  # type: ignore[assignment]
        self.options = {"state": {"noise": noise}} if is_kept else {}

    def after_step(self) -> None:
        if self.loader.sync_gradients:
            torch.rand((), generator=self.model.noise)  # type: ignore[call-overload]


def test_an_update_that_draws_from_a_generator_that_a_joiner_would_begin_anew_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"own, model\.noise, after the backward pass, and a worker that joins or resumes"
    ):
        DrawsInUpdates().train()
    DrawsInUpdates(is_kept=True).train()


def test_a_generator_that_is_drawn_from_at_the_end_of_an_epoch_is_no_mistake() -> None:
    """Such as that of a validation's own loader: an epoch has one iteration."""
    DrawsInUpdates(dataset=Subset(Samples(), range(8))).train(epochs=6)


class Recurrent(Body):
    """Truncated back-propagation through time."""

    def __init__(self, *, carries: bool) -> None:
        super().__init__(nn.RNN(4, 2))
        self.carries = carries
        self.hidden: Tensor | None = None

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs, hidden = self.model(inputs, self.hidden)
        self.hidden = hidden.detach() if self.carries else None
        return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_state_that_is_carried_from_batch_to_batch_is_refused(num_shards: int) -> None:
    with pytest.raises(CarriedState, match="the model was given an output of an earlier batch"):
        Recurrent(carries=True).train(num_shards=num_shards)


def test_a_recurrent_network_with_a_fresh_state_in_each_batch_trains() -> None:
    Recurrent(carries=False).train()


class CountsBatches(Body):
    """A learning rate by a counter of batches."""

    def after_step(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + self.batches)


class CountsIterations(Body):
    """A learning rate by iterations."""

    def after_step(self) -> None:
        if self.loader.sync_gradients:
            self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + self.loader.iteration)


def test_a_learning_rate_that_counts_batches_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the optimizer's lr changed from 0.01 to 0.005 in a batch that does not"):
        CountsBatches().train()
    CountsIterations().train()


class Averaging(Body):
    """An average of weights."""

    def __init__(self, *, gated: bool, in_state: bool) -> None:
        super().__init__()
        self.gated = gated
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        if in_state:
            self.options = {"state": {"ema": self.average}}

    def after_step(self) -> None:
        if self.loader.sync_gradients or not self.gated:
            self.average.update_parameters(self.model)


def test_an_average_that_takes_in_each_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"updated for a batch, not for an iteration.*if loader.sync_gradients:"):
        Averaging(gated=False, in_state=True).train()


def test_an_average_that_a_joiner_would_begin_anew_is_refused() -> None:
    with pytest.raises(UsageError, match=r'not part of the run\'s state.*state=\{"ema": ema\}'):
        Averaging(gated=True, in_state=False).train()


def test_an_average_of_iterations_that_is_part_of_the_state_trains() -> None:
    Averaging(gated=True, in_state=True).train()


class Copying(Body):
    """An average of weights by hand: a copy of the model, or a dict."""

    def __init__(self, kind: str, *, decay: float = 0.9) -> None:
        super().__init__()
        self.kind = kind
        self.decay = decay
        self.copy = copy.deepcopy(self.model)
        self.listed = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.shadow = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def after_step(self) -> None:
        if self.loader.sync_gradients:
            if self.kind == "list":
                torch._foreach_lerp_(self.listed, list(self.model.parameters()), 1 - self.decay)
            for (name, parameter), twin in zip(self.model.named_parameters(), self.copy.parameters(), strict=True):
                if self.kind == "model":
                    twin.lerp_(parameter, 1 - self.decay)
                elif self.kind == "dict":
                    self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * parameter
                elif self.kind == "gradients":
                    assert parameter.grad is not None
                    self.shadow[name] = parameter.grad.clone()


@pytest.mark.parametrize(
    ("kind", "what"),
    [("model", "a second Linear like the model"), ("dict", "a dict of tensors"), ("list", "a list of tensors")],
)
def test_an_average_by_hand_that_a_joiner_would_begin_anew_is_refused(kind: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"{what}.* is not part of the run's state"):
        Copying(kind).train()


@pytest.mark.parametrize("kind", ["nothing", "gradients"])
def test_a_copy_that_stays_and_a_dict_of_gradients_are_no_averages(kind: str) -> None:
    Copying(kind).train()


def test_an_average_by_hand_that_is_part_of_the_state_trains() -> None:
    body = Copying("model")
    body.options = {"state": {"teacher": body.copy}}
    body.train()


class Counter:
    """A part of the state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.parametrize("gated", [False, True])
def test_a_part_of_the_state_that_counts_batches_is_refused(gated: bool) -> None:
    counter = Counter()

    class Counting(Body):
        def after_step(self) -> None:
            if self.loader.sync_gradients or not gated:
                counter.count += 1

    body = Counting(state={"counter": counter})
    if gated:
        body.train()
        return
    with pytest.raises(UsageError, match='the part "counter" of the state changed in a batch that does not complete'):
        body.train()


def test_what_a_script_writes_into_a_buffer_after_the_exchange_stays() -> None:
    model = nn.BatchNorm1d(4)

    class Writing(Body):
        def after_step(self) -> None:
            if self.loader.sync_gradients:
                self.model.running_mean.fill_(7.0)  # type: ignore[union-attr, operator]

    Writing(model).train(epochs=1)
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [7.0] * 4


@pytest.mark.parametrize(
    ("fact", "complaint"),
    [
        ("optimizer_options", "worker 2 has another learning rate .* than the others in the same iteration"),
        (
            "inputs",
            "worker 2 called the model with other inputs than the others, probably because of an iterator",
        ),
        ("output_gradients", "another loss from the model's outputs than the others, probably because of an iterator"),
        ("buffers", "worker 2 has other buffers of the model than the others before the same iteration"),
        ("extra_state", "worker 2 has other extra state of modules .* than the others at the same iteration"),
    ],
)
def test_what_workers_change_differently_after_an_exchange_is_named(fact: str, complaint: str) -> None:
    with pytest.raises(MembersDiffer, match=complaint):
        check_members_agree([{fact: "1"}, {fact: "1"}, {fact: "2"}], [0, 1, 2])


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (ShardFingerprint("b", "0x1p+0"), "worker 2 read other samples than the others .*: probably the"),
        (ShardFingerprint("a", "0x2p+0", "g"), "worker 2 computed another loss than .*: probably the model or"),
        (ShardFingerprint("a", "0x1p+0", "h"), "worker 2 computed other gradients than .*: probably a gradient"),
    ],
)
def test_members_that_make_something_else_of_the_first_shard_are_named(other: ShardFingerprint, complaint: str) -> None:
    usual = ShardFingerprint("a", "0x1p+0", "g")
    check_fingerprints([usual, None, usual], [0, 1, 2])
    check_fingerprints([None, None, other], [0, 1, 2])
    with pytest.raises(MembersDiffer, match=complaint):
        check_fingerprints([usual, usual, other], [0, 1, 2])


def test_the_first_shard_is_compared_seldom() -> None:
    assert [epoch for epoch in range(40) if is_compared_in_epoch(epoch)] == [0, 1, 2, 4, 8, 16, 32]
    numbers = [number for number in range(100) if is_compared_iteration(number)]
    assert numbers == [0, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]


@pytest.mark.parametrize("threshold", [8, 9, 13, 100, 777, 1000, 12345])
def test_what_begins_with_a_number_of_batches_is_seen_while_workers_with_fewer_shards_lack_it(threshold: int) -> None:
    begins = -(-threshold // 2)  # for a worker with two shards, while one with a single shard still has to come there
    assert any(is_compared_iteration(number) for number in range(begins, threshold))


class Counting(Body):
    """Its loss depends on how many batches it has seen."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(inputs, targets) * (1 + self.batches)


class Normalizing(Body):
    """It divides gradients by a norm that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = 1.0
        for parameter in self.model.parameters():
            parameter.register_hook(self._normalize)

    def _normalize(self, gradient: Tensor) -> Tensor:
        self.norm = 0.9 * self.norm + 0.1 * float(gradient.norm())
        return gradient / self.norm


@pytest.mark.parametrize(("body", "what"), [(Counting, "another loss"), (Normalizing, "other gradients")])
def test_a_worker_by_itself_computes_the_first_shard_again_and_compares(body: type[Body], what: str) -> None:
    with pytest.raises(NotRepeatable, match=f"the same shard has {what} when it is computed again after others"):
        body().train()


def test_a_single_shard_is_computed_once_as_in_the_plain_loop() -> None:
    body = Counting()
    body.train(num_shards=1)
    assert body.batches == 3 * 4


def test_shards_are_read_again_only_where_they_are_compared() -> None:
    reads: list[int] = []

    class Counted(Samples):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            reads.append(index)
            return super().__getitem__(index)

    body = Body(dataset=Counted())
    dataset_digest(body.dataset)
    in_digest = len(reads)
    body.train(epochs=6)
    compared = len([0, 2, 4, 6, 8, 12, 16])  # of 24; the first ones of epochs 1, 2 and 4 are among them
    of_first = compared * 4 * 4  # two more times a shard of four as it is computed, and two as it is computed again
    of_rows = len(COMPARED_AT) * (4 + 4 + 8)
    assert len(reads) - 2 * in_digest - 6 * 32 == of_first + of_rows


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_an_elastic_script_under_another_launcher_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_not_started_several_times({})
    check_not_started_several_times({name: "1"})
    monkeypatch.setenv(name, "3")
    with pytest.raises(StartedSeveralTimes, match=rf"started as one of 3 processes \({name}=3\).*resile run"):
        Body().train()


def test_ibms_number_of_engines_is_not_taken_for_a_number_of_shards() -> None:
    from resile.training import ElasticModel

    with pytest.raises(TypeError, match="positional argument"):
        ElasticModel(
            nn.Linear(4, 2), lambda: (Samples(), None), F.cross_entropy, torch.optim.SGD([nn.Parameter()])
        ).train(
            3,
            8,
            4,  # type: ignore[misc]
        )


def test_the_loop_written_by_hand_is_watched_alike() -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for iteration in ElasticLoop(model, optimizer, Samples(), batch_size=8, num_shards=2):
            for inputs, targets in iteration.shards():
                iteration.backward(F.cross_entropy(model(inputs), targets))
                optimizer.param_groups[0]["lr"] *= 0.9
            if iteration.exchange():
                optimizer.step()

    with pytest.raises(UsageError, match="the optimizer's lr changed"):
        Context().run(run)


def test_the_search_for_averages_ends_with_the_third_iteration() -> None:
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)
    watch = AverageWatch(model, {})
    for iteration in range(2):
        watch.begin_iteration(iteration)
    assert watch._copies
    for iteration in range(2, 5):
        watch.begin_iteration(iteration)
    assert not watch._copies
    assert twin is not model


class ChangesParameters(Body):
    """Weights that are decayed by hand."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.gated = gated

    @torch.no_grad()
    def after_step(self) -> None:
        if self.loader.sync_gradients or not self.gated:
            for parameter in self.model.parameters():
                parameter.data.mul_(0.99)


def test_parameters_that_change_with_each_batch_are_refused_on_a_single_worker_too() -> None:
    with pytest.raises(UsageError, match=r"changed the parameter weight in a batch .*if loader.sync_gradients:"):
        ChangesParameters(gated=False).train()
    ChangesParameters(gated=True).train()


class OtherOptimizer(Body):
    """A second optimizer, of which the training call knows nothing."""

    def __init__(self, *, parameters: Callable[[nn.Sequential], Any]) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        super().__init__(model)
        self.optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
        self.other = torch.optim.Adam(parameters(model), lr=0.01)

    def after_step(self) -> None:
        self.other.step()


def test_an_optimizer_that_the_training_call_was_not_given_may_not_step_the_model() -> None:
    with pytest.raises(UsageError, match=r"an optimizer \(Adam\) that the training call was not given stepped"):
        OtherOptimizer(parameters=lambda model: model[1].parameters()).train()
    OtherOptimizer(parameters=lambda model: nn.Linear(2, 2).parameters()).train()


class DividesLoss(Body):
    """A loss that was made for accumulated gradients."""

    def __init__(self, *, num_losses: int = 1) -> None:
        super().__init__(accumulate=2)
        self.num_losses = num_losses

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().loss(inputs, targets)
        return (loss if self.num_losses == 1 else loss + self.model(inputs).square().mean()) / 2


def test_a_loss_that_is_divided_by_the_number_of_accumulated_batches_is_refused() -> None:
    with pytest.raises(LossIsDivided, match=r"divided by 2, .* remove `/ 2` from the loss"):
        DividesLoss().train(num_shards=None)
    DividesLoss(num_losses=2).train(num_shards=None)


class SumsLoss(Body):
    """A sum over the samples of a shard, divided by a number."""

    def __init__(self, divided: Callable[[Tensor], Tensor], *, reduction: str) -> None:
        super().__init__()
        self.divided = divided
        self.reduction = reduction

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(inputs), targets, reduction=self.reduction)
        return self.divided(loss if self.reduction == "sum" else loss.sum())


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("divided", [lambda loss: loss / 8, lambda loss: loss * (1 / 8), lambda loss: 0.5 * loss])
def test_a_sum_that_is_divided_by_the_size_of_the_whole_batch_is_refused(
    divided: Callable[[Tensor], Tensor], reduction: str
) -> None:
    with pytest.raises(LossIsASum, match=r"divided by 8, which belongs to the whole batch of 8|half of a sum"):
        SumsLoss(divided, reduction=reduction).train()
    SumsLoss(lambda loss: loss / 4, reduction=reduction).train()
    SumsLoss(lambda loss: loss / 8, reduction=reduction).train(num_shards=1)


def test_a_model_whose_parameters_have_no_shape_yet_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"nn.LazyLinear .* compute one batch with it before the training call"):
        Body(nn.LazyLinear(2)).train()


class EasierEachEpoch(Samples):
    """A dataset that the script changes between epochs."""

    noise = 1.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs + self.noise, target


def test_worker_processes_of_a_loader_see_what_a_script_changes_in_its_dataset_between_epochs() -> None:
    def train(num_workers: int) -> list[float]:
        seed(0)
        dataset, model = EasierEachEpoch(), nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        _, _, loader = prepare(model, optimizer, DataLoader(dataset, batch_size=16, num_workers=num_workers))
        for epoch in loader.epochs(3):
            dataset.noise = float(epoch)
            for inputs, targets in loader:
                F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            losses.append(loader.loss)
        return losses

    assert Context().run(train, 1) == Context().run(train, 0)


def test_a_prepared_loader_has_the_batch_size_of_the_one_that_it_was_made_of() -> None:
    body = Body(accumulate=2)
    body.train(num_shards=None)
    assert (body.loader.batch_size, body.loader.dataset) == (8, body.dataset)


PRINT = ShardFingerprint("batch", "loss")


def compared(workers: tuple[int, ...], members: dict[int, NewMembers], generation: int = 2) -> set[int]:
    """Who is compared in the next iteration; what they compute goes into its headers."""
    views = {worker: View(generation, workers, worker) for worker in workers}
    taking_part = {worker for worker in workers if members[worker].takes_part(views[worker])}
    are_new = [members[worker].is_new for worker in workers]
    prints = [PRINT if worker in taking_part else None for worker in workers]
    for worker in workers:
        members[worker].on_round(views[worker], are_new, prints)
    return taking_part


def known() -> NewMembers:
    member = NewMembers()
    member.is_new = False
    return member


@pytest.mark.parametrize(("workers", "expected"), [((0, 1, 5), {0, 5}), ((5, 0, 1), {0, 5}), ((0, 5, 1, 6), {0, 5, 6})])
def test_a_joiner_is_compared_in_its_second_iteration_with_one_other(
    workers: tuple[int, ...], expected: set[int]
) -> None:
    """Rank 0, which computes the first shard in any case, or, if it has joined, the first that has not."""
    members = {worker: NewMembers() if worker >= 5 else known() for worker in workers}
    assert [compared(workers, members) for _ in range(3)] == [set(), expected, set()]


def test_nobody_is_compared_after_a_loss_or_a_shrink() -> None:
    members = {worker: known() for worker in range(4)}
    assert [compared(workers, members) for workers in ((0, 1, 2, 3), (0, 2, 3), (2, 3), (3,))] == [set()] * 4


def test_a_joiner_that_was_not_compared_is_compared_later() -> None:
    """The one that it would be compared with was behind, and received the state instead of the headers."""
    members = {0: known(), 1: known(), 5: NewMembers()}
    compared((0, 1, 5), members)
    members[0] = known()
    assert compared((0, 1, 5), members) == {5}
    assert compared((0, 1, 5), members) == {0, 5}
    assert compared((0, 1, 5), members) == set()


def test_of_two_that_differ_the_one_that_has_joined_is_named() -> None:
    other = ShardFingerprint("another batch", "loss")
    with pytest.raises(MembersDiffer, match="worker 5 read other samples"):
        check_fingerprints([other, None, PRINT], [5, 1, 0])
