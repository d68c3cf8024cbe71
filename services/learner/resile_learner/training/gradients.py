"""Gradients of this worker: folded and pushed during the backward pass, and replaced by the sums afterwards."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from resile_shared.errors import UsageError

from ..collectives.tree import Interval
from .digest import bits_of, content_digest
from .slots import LeafStep, LocalPlan, Slots, local_plan


class Gradients:
    """The gradients of a model's trainable parameters, folded leaf by leaf and pushed bucket by bucket."""

    def __init__(self, parameters: Sequence[Tensor], *, bucket_bytes: int | None = None) -> None:
        self._parameters = list(parameters)
        self._measures_norms = False
        self._squares: list[list[Tensor]] = []
        self._first_bits: list[list[Tensor]] | None = None
        self._slots = Slots(self._parameters, bucket_bytes=bucket_bytes)
        self.buckets = self._slots.buckets
        self.used = [False] * len(self._parameters)
        self._leaf: _Leaf | None = None
        self._bucket_of = {p: b for b, bucket in enumerate(self.buckets) for p in bucket.members}
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(GradientHook(self, index))  # type: ignore[no-untyped-call]

    def begin(
        self,
        num_leaves: int,
        held: Interval,
        num_shards: int | None = None,
        *,
        measures_norms: bool = False,
        digests_first: bool = False,
    ) -> LocalPlan:
        """Begin an iteration in which this worker holds the leaves ``held``, or a single one that sums ``num_shards``.

        With ``digests_first``, `first_digest` is that of the first leaf that is folded.
        """
        self._measures_norms = measures_norms
        self.used = [False] * len(self._parameters)
        self._leaf = None
        self._squares = []
        self._first_bits = [] if digests_first else None
        plan = local_plan(num_leaves, held, num_shards)
        self._slots.reserve(plan)
        return plan

    def partials(self, plan: LocalPlan) -> list[list[Tensor]]:
        """[bucket][piece]: the flat tensors that hold this worker's partial sums once they are pushed."""
        return self._slots.partials(plan)

    def sums(self) -> list[Tensor]:
        """[bucket]: the flat tensors into which an exchange writes the sums."""
        return self._slots.sums

    def clear(self) -> None:
        """Clear all gradients before the next backward pass."""
        for parameter in self._parameters:
            parameter.grad = None

    def names(self, model: nn.Module) -> list[str]:
        """The names that the parameters have in ``model``."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [names[id(parameter)] for parameter in self._parameters]

    def take(self) -> dict[int, Tensor]:
        """Take the gradients that a backward pass has left away from the parameters, by the number of each."""
        found = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        self.clear()
        return found

    def expect(self, step: LeafStep) -> None:
        """Let gradient hooks fold the next leaf, bucket by bucket, during its backward pass."""
        self._leaf = _Leaf(step, self._num_parameters())

    def fold(self, step: LeafStep) -> None:
        """Fold what no hook has folded of a finished leaf."""
        self._finish(self._leaf or _Leaf(step))

    def overlap(self, plan: LocalPlan, push: Callable[[int], None]) -> None:
        """Let gradient hooks fold the last leaf and push its buckets, during its backward pass."""
        self._leaf = _Leaf(plan.steps[-1], self._num_parameters(), push)

    def push_rest(self, push: Callable[[int], None]) -> None:
        """Push every bucket that no hook has pushed: parameters without a gradient, or no leaf at all."""
        self._finish(self._leaf or _Leaf(push=push))

    def digest(self) -> str:
        """A cheap check of the gradients that a backward pass has left and that are not folded."""
        return _joined([self._bits(b) for b in range(len(self.buckets))])

    def first_digest(self) -> str:
        """The `digest` of the first leaf, once it is folded."""
        assert self._first_bits is not None
        return _joined(self._first_bits)

    def _bits(self, b: int) -> list[Tensor]:
        return [bits_of(self._parameters[index].grad) for index in self.buckets[b].members]

    def squares(self) -> list[float]:
        """For each leaf held, once all are folded: the squared norm of its gradients, if norms are measured."""
        return [sum(map(float, squares)) for squares in self._squares]

    def square_of_sums(self) -> float:
        """The squared norm of the summed gradients, once they are assigned."""
        return sum(float(_square([flat])) for flat in self._slots.sums)

    def assign(self, used: Sequence[bool], *, scale: float = 1.0) -> None:
        """Give each parameter its summed gradient times ``scale``, and None to those that no shard used."""
        if scale != 1.0:
            torch._foreach_mul_(self._slots.sums, scale)
        for parameter, view, is_used in zip(self._parameters, self._slots.sum_views, used, strict=True):
            parameter.grad = view if is_used else None

    def add(self, used: Sequence[bool], replace: Callable[[int, Tensor], Tensor]) -> None:
        """Add the summed gradients to those of the parameters, as a backward pass does. The sums stay as they are.

        ``replace`` returns what is to be added for the gradient of the parameter with some number: that gradient, or
        a new one.
        """
        for number, (parameter, view) in enumerate(zip(self._parameters, self._slots.sum_views, strict=True)):
            if not used[number]:
                continue
            gradient = replace(number, view)
            with torch.no_grad():
                if parameter.grad is not None:
                    parameter.grad.add_(gradient)
                elif gradient is view:
                    parameter.grad = view.clone(memory_format=torch.preserve_format)
                else:
                    parameter.grad = gradient

    def arrived(self, index: int) -> None:
        """Count the gradient of a parameter; called by its hook."""
        leaf = self._leaf
        if leaf is None:
            return
        bucket = self._bucket_of[index]
        leaf.waiting[bucket] -= 1
        if leaf.waiting[bucket] < 0:
            raise UsageError(
                "a parameter was given a gradient twice in one shard: call iteration.backward() once, with the sum of "
                "all losses, and use torch.utils.checkpoint with use_reentrant=False"
            )
        while leaf.next_bucket < len(self.buckets) and leaf.waiting[leaf.next_bucket] == 0:
            self._complete_bucket(leaf)

    def _num_parameters(self) -> list[int]:
        return [len(bucket.members) for bucket in self.buckets]

    def _finish(self, leaf: "_Leaf") -> None:
        self._leaf = None
        while leaf.next_bucket < len(self.buckets):
            self._complete_bucket(leaf)
        if leaf.step is not None and self._measures_norms:
            self._squares.append(leaf.squares)

    def _complete_bucket(self, leaf: "_Leaf") -> None:
        bucket = leaf.next_bucket
        leaf.next_bucket += 1
        if leaf.step is not None:
            leaf.squares += self._fold_bucket(bucket, leaf.step)
        if leaf.push is not None:
            leaf.push(bucket)

    def _fold_bucket(self, b: int, step: LeafStep) -> list[Tensor]:
        """Fold the gradients of one bucket and free them: their memory, still in the cache, serves the next layer.

        Returns their squared norm, if norms are measured.
        """
        if self._first_bits is not None and len(self._first_bits) < len(self.buckets):
            self._first_bits.append(self._bits(b))
        gradients: dict[int, Tensor] = {}
        for index in self.buckets[b].members:
            gradient, self._parameters[index].grad = self._parameters[index].grad, None
            if gradient is not None:
                self.used[index] = True
                gradients[index] = gradient
        dense = list(gradients.values())
        _check_dense(dense)
        self._slots.fold(b, step, gradients)
        return [_square(dense)] if self._measures_norms and dense else []


def check_shapes(parameters: Iterable[Tensor]) -> None:
    """Raise UsageError for parameters of lazy modules, which have no shape yet."""
    if any(is_lazy(parameter) for parameter in parameters):
        raise UsageError(
            "the model has parameters without a shape (of nn.LazyLinear or another lazy module): compute one batch "
            "with it before the training call, as in `model(dataset[0][0][None])`, and then make the optimizer"
        )


def gradients_of(optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor]) -> list[Gradients]:
    """The gradients that each optimizer steps with: with a single one, those of all trainable parameters."""
    check_shapes(parameters)
    if len(optimizers) == 1:
        return [Gradients([parameter for parameter in parameters if parameter.requires_grad])]
    order = {id(parameter): index for index, parameter in enumerate(parameters)}
    result = []
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = [parameter for parameter in held if parameter.requires_grad and id(parameter) in order]
        result.append(Gradients(sorted(held, key=lambda parameter: order[id(parameter)])))
    return result


@dataclass
class _Leaf:
    """The leaf whose backward pass is running, and what to do with each bucket once it is complete."""

    step: LeafStep | None = None
    """How to fold the leaf; None when this worker holds none."""
    waiting: list[int] = field(default_factory=list)
    """[bucket]: the number of gradients still to come."""
    push: Callable[[int], None] | None = None
    next_bucket: int = 0
    squares: list[Tensor] = field(default_factory=list)
    """The squared norms of the gradients of the buckets so far, if norms are measured."""


class GradientHook:
    """Notices that a parameter has its gradient. It holds no graph and lives as long as its parameter."""

    def __init__(self, gradients: Gradients, index: int) -> None:
        self._gradients = gradients
        self._index = index

    def __call__(self, parameter: Tensor) -> None:
        """Count the gradient of ``parameter``."""
        self._gradients.arrived(self._index)


def _joined(bits: Sequence[Sequence[Tensor]]) -> str:
    return content_digest([int(each) for bucket in bits for each in bucket])


def _square(tensors: list[Tensor]) -> Tensor:
    """The squared norm of tensors of one dtype and device, together, as a tensor, without waiting for a device."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).double().square().sum()


def _check_dense(gradients: Sequence[Tensor]) -> None:
    for gradient in gradients:
        if gradient.layout != torch.strided:
            raise UsageError(
                "a parameter has a sparse gradient, which cannot be exchanged: use sparse=False in nn.Embedding and "
                "nn.EmbeddingBag, and torch.optim.Adam instead of SparseAdam"
            )
