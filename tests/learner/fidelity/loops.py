"""Situations of loops: what a script does around the forward and the backward pass."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from .situation import EPOCHS, Script, data, loop, perceptron, sgd


def error(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def norm_of(parameters: Any) -> Tensor:
    return torch.stack([each.grad.norm() for each in parameters]).norm()


@loop("gradients accumulated by hand over two batches")
def accumulated(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for number, batch in enumerate(loader):
            loss = error(model, batch) / 2
            loss.backward()
            if number % 2 or number == len(loader) - 1:
                optimizer.step()
                optimizer.zero_grad()
            script.print(loss)


@loop("clipping of gradients, whose norm is printed")
def clipped(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            script.print(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()


@loop("gradients changed by hand before the step, and their norm printed")
def changed_gradients(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            for parameter in model.parameters():
                parameter.grad.div_(parameter.grad.norm() + 1e-3)
            optimizer.step()
            script.print(norm_of(model.parameters()))


@loop("a schedule made for epochs * len(loader) steps")
def scheduled(script: Script) -> None:
    model = perceptron()
    optimizer, loader = sgd(model), script.loader_of(data())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, epochs=EPOCHS, steps_per_epoch=len(loader))
    model, optimizer, loader, schedule = script.prepare(model, optimizer, loader, scheduler=schedule)
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
            schedule.step()
            script.print(schedule.get_last_lr()[0])


@loop("a schedule made after `prepare`, and not given to it")
def own_schedule(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
            schedule.step()
            script.print(schedule.get_last_lr()[0])


@loop("the learning rate set by hand at the top of the body (lr_at_top_of_body.py)")
def own_rates(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    number = 0
    for _ in script.epochs():
        for batch in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + number)
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
            number += 1
            script.print(optimizer.param_groups[0]["lr"])


class Warmup:
    """It counts steps and sets rates, around an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(self.steps**-0.5, self.steps * 4**-1.5)
        self.optimizer.step()


@loop("a wrapper of the optimizer, given to `prepare` (optimizer_wrapper.py)")
def wrapped(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, Warmup(sgd(model)))
    train_with(script, model, optimizer, loader)


@loop("a wrapper around the optimizer that `prepare` has returned")
def wrapped_afterwards(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    train_with(script, model, Warmup(optimizer), loader)


def train_with(script: Script, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
    script.print(getattr(optimizer, "steps", 0))


@loop("ReduceLROnPlateau by the mean loss of an epoch, averaged by hand")
def plateau(script: Script) -> None:
    model = perceptron()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    model, optimizer, loader, schedule = script.prepare(model, optimizer, scheduler=schedule)
    for _ in script.epochs(5):
        sums, rows = 0.0, 0
        for batch in loader:
            optimizer.zero_grad()
            loss = error(model, batch)
            loss.backward()
            optimizer.step()
            sums, rows = sums + loss.item() * len(batch[0]), rows + len(batch[0])
        schedule.step(sums / rows)
        script.print(sums / rows, optimizer.param_groups[0]["lr"])


@loop("the loss and the accuracy of an epoch, averaged by hand")
def metrics(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        losses, right, rows = [], 0, 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = model(inputs)
            loss = F.cross_entropy(logits, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right, rows = right + int((logits.argmax(1) == targets).sum()), rows + len(targets)
        script.print(sum(losses) / len(losses), right / rows)


@loop("a moving average of the weights, by hand")
def averaged(script: Script) -> None:
    model = perceptron()
    average = copy.deepcopy(model)
    model, optimizer, loader = script.prepare(model, sgd(model), **script_state(script, average))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
            with torch.no_grad():
                for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(parameter, 0.1)
    script.print(*(each.norm() for each in average.parameters()))


@loop("AveragedModel of PyTorch")
def averaged_model(script: Script) -> None:
    model = perceptron()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model, optimizer, loader = script.prepare(model, sgd(model), **script_state(script, average))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
            average.update_parameters(model)
    script.print(*(each.norm() for each in average.parameters()))


def script_state(script: Script, part: Any) -> dict[str, Any]:
    return {} if script.body == "plain" else {"state": {"part": part}}


@loop("early stopping by a validation, and the best model restored")
def stopped_early(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, torch.optim.SGD(model.parameters(), lr=3.0))
    held_out = TensorDataset(data().tensors[0].roll(1, 1), data().tensors[1])
    best, kept = float("inf"), model.state_dict()
    for _ in script.epochs(8):
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
        with torch.no_grad():
            score = error(model, held_out.tensors).item()
        script.print(score)
        if score >= best:
            break
        best, kept = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)


@loop("the best parameters put back within training, when the loss has grown")
def put_back(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, torch.optim.SGD(model.parameters(), lr=3.0))
    best, kept = float("inf"), copy.deepcopy(model.state_dict())
    for _ in script.epochs(6):
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
        with torch.no_grad():
            score = error(model, data().tensors).item()
        if score < best:
            best, kept = score, copy.deepcopy(model.state_dict())
        else:
            model.load_state_dict(kept)
        script.print(score)


@loop("a penalty on gradients of gradients (WGAN-GP)")
def gradient_penalty(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            wanted = inputs.clone().requires_grad_()
            logits = model(wanted)
            (slope,) = torch.autograd.grad(logits.sum(), wanted, create_graph=True)
            loss = F.cross_entropy(logits, targets) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            script.print(loss)


@loop("adversarial inputs, by the gradient with respect to the inputs (FGSM)")
def adversarial(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            wanted = inputs.clone().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(wanted), targets), wanted)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs + 0.1 * slope.sign()), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            script.print(loss)


class SAM(torch.optim.SGD):
    """Its usual form: two steps, a backward pass before each."""

    moved: list[tuple[Tensor, Tensor]]

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        scale = 0.05 / (norm_of(parameters) + 1e-12) if parameters else 1.0
        self.moved = [(each, each.grad * scale) for each in parameters]
        for parameter, by in self.moved:
            parameter.add_(by)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter, by in self.moved:
            parameter.sub_(by)
        self.step()


@loop("SAM in two steps (sam_two_steps_message.py)")
def sam(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, SAM(model.parameters(), lr=0.1))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = error(model, batch)
            loss.backward()
            optimizer.first_step()
            error(model, batch).backward()
            optimizer.second_step()
            script.print(loss)


@loop("LBFGS, with a closure")
def lbfgs(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    for _ in script.epochs():
        for batch in loader:

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = error(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            script.print(optimizer.step(closure))


@loop("a GAN: two models and optimizers", tolerance=1e-4)
def gan(script: Script) -> None:
    maker, critic = perceptron(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, critic)]
    (maker, critic), (first, second), loader = script.prepare([maker, critic], optimizers)
    for _ in script.epochs():
        for inputs, _ in loader:
            made = maker(inputs)
            first.zero_grad()
            loss = F.softplus(-critic(made)).mean()
            loss.backward()
            first.step()
            second.zero_grad()
            judged = F.softplus(-critic(inputs[:, :4])).mean() + F.softplus(critic(made.detach())).mean()
            judged.backward()
            second.step()
            script.print(loss, judged)


@loop("two losses with two optimizers of one model")
def two_optimizers(script: Script) -> None:
    model: Any = perceptron()
    optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
    model, (first, second), loader = script.prepare(model, optimizers)
    for _ in script.epochs():
        for inputs, targets in loader:
            for optimizer, loss_fn in ((first, F.cross_entropy), (second, F.multi_margin_loss)):
                optimizer.zero_grad()
                loss = loss_fn(model(inputs), targets)
                loss.backward()
                optimizer.step()
                script.print(loss)


@loop("two losses with a backward pass each, and one step")
def two_backward_passes(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = model(inputs)
            F.cross_entropy(logits, targets).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            (0.1 * logits.square().mean()).backward()
            optimizer.step()


@loop("a body that skips batches")
def skipped_batches(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for number, batch in enumerate(loader):
            if number == 1:
                continue
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()


@loop("a step that is skipped where the gradient is large")
def skipped_steps(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            if norm_of(model.parameters()) < 0.4:
                optimizer.step()


@loop("an epoch that is left after two batches")
def left_early(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for number, batch in enumerate(loader):
            if number == 2:
                break
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()


@loop("a step by hand, without an optimizer's")
def step_by_hand(script: Script) -> None:
    model = perceptron()
    model, _, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch in loader:
            error(model, batch).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


@loop("weights clamped after each step")
def clamped_weights(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.2, 0.2)


@loop("layers frozen and unfrozen between epochs")
def frozen(script: Script) -> None:
    model: Any = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for epoch in script.epochs(4):
        model[0].requires_grad_(epoch % 2 == 1)
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()


@loop("parameters added to the optimizer in a later epoch")
def added_parameters(script: Script) -> None:
    model: Any = perceptron()
    model, optimizer, loader = script.prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    for epoch in script.epochs():
        if epoch == 1:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()


@loop("an optimizer made anew in each epoch")
def new_optimizers(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        optimizer = sgd(model)
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()


@loop("a teacher that follows the model (mean teacher, BYOL)")
def teacher(script: Script) -> None:
    model = perceptron()
    guide = copy.deepcopy(model).requires_grad_(False)
    model, optimizer, loader = script.prepare(model, sgd(model), **script_state(script, guide))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = error(model, batch) + F.mse_loss(model(batch[0]), guide(batch[0] + 0.1))
            loss.backward()
            optimizer.step()
            for kept, parameter in zip(guide.parameters(), model.parameters(), strict=True):
                kept.data.lerp_(parameter.data, 0.2)
            script.print(loss)


@loop("two views of each sample, in two calls of the model")
def two_calls(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, _ in loader:
            optimizer.zero_grad()
            left, right = (F.normalize(model(each), dim=1) for each in (inputs, inputs.roll(1, 1)))
            loss = F.cross_entropy(left @ right.T / 0.5, torch.arange(len(left)))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            script.print(loss)


@loop("samples of a batch mixed with each other before the model (mixup)")
def mixed(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = model(0.7 * inputs + 0.3 * inputs.flip(0))
            loss = 0.7 * F.cross_entropy(logits, targets) + 0.3 * F.cross_entropy(logits, targets.flip(0))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            script.print(loss)


@loop("inputs standardized by the batch in the body")
def standardized(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = error(model, ((inputs - inputs.mean(0)) / inputs.std(0), targets))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            script.print(loss)


@loop("counts of classes in a variable of the loop, as weights")
def counted_classes(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    counts = torch.ones(4)
    for _ in script.epochs():
        for inputs, targets in loader:
            counts += torch.bincount(targets, minlength=4)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets, weight=1 / counts)
            loss.backward()
            optimizer.step()
            script.print(loss)


@loop("a hidden state in a variable of the loop")
def carried_in_loop(script: Script) -> None:
    recurrent, head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 4)
    (recurrent, head), optimizer, loader = script.prepare([recurrent, head], sgd(nn.ModuleList([recurrent, head])))
    hidden = None
    for _ in script.epochs():
        for inputs, targets in loader:
            outputs, hidden = recurrent(inputs[..., None], hidden)
            hidden = tuple(each.detach() for each in hidden)
            optimizer.zero_grad()
            loss = F.cross_entropy(head(outputs[:, -1]), targets)
            loss.backward()
            optimizer.step()
            script.print(loss)


class Indexed(Dataset[Any]):
    def __len__(self) -> int:
        return len(data())

    def __getitem__(self, index: int) -> Any:
        return index, *data()[index]


@loop("losses kept for each sample by its index, as weights of the next epoch")
def kept_losses(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(Indexed()))
    kept = torch.ones(len(data()))
    for _ in script.epochs():
        for index, inputs, targets in loader:
            optimizer.zero_grad()
            each = F.cross_entropy(model(inputs), targets, reduction="none")
            loss = (each * kept[index]).sum() / kept[index].sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            kept[index] = each.detach()
            script.print(loss)


@loop("a weighted sampler", is_random=True)
def weighted_sampler(script: Script) -> None:
    model = perceptron()
    sampler = WeightedRandomSampler((1 + 4 * data().tensors[1]).tolist(), len(data()))
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(data(), sampler=sampler))
    train_with(script, model, optimizer, loader)


@loop("a shuffling loader", is_random=True)
def shuffled(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(data(), shuffle=True))
    train_with(script, model, optimizer, loader)


@loop("batches that a batch sampler makes, of different sizes")
def batch_sampler(script: Script) -> None:
    model = perceptron()
    batches = [list(range(40)), list(range(40, 60)), list(range(60, 96))]
    loader = torch.utils.data.DataLoader(data(), batch_sampler=batches)
    model, optimizer, loader = script.prepare(model, sgd(model), loader)
    train_with(script, model, optimizer, loader)


@loop("`drop_last`")
def dropped(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(data(90), drop_last=True))
    train_with(script, model, optimizer, loader)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data()


@loop("an IterableDataset")
def stream(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(Stream()))
    train_with(script, model, optimizer, loader)


def collate(samples: Any) -> Any:
    """Cut the texts of a batch at the longest one."""
    x, y = torch.utils.data.default_collate(samples)
    lengths = 1 + (torch.arange(len(x)) + int(x[0, 0] > 0)) % 6
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return x[:, : mask.shape[1]] * mask, mask.float(), y


@loop("texts padded to the longest one of the batch by `collate_fn`")
def padded(script: Script) -> None:
    model: Any = nn.GRU(1, 4, batch_first=True)
    loader = script.loader_of(data(), collate_fn=collate)
    model, optimizer, loader = script.prepare(model, sgd(model), loader)
    for _ in script.epochs():
        for inputs, mask, targets in loader:
            optimizer.zero_grad()
            outputs = (model(inputs[..., None])[0] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()
            optimizer.step()
            script.print(loss)


class Curriculum(TensorDataset):
    """Its samples depend on what the script sets."""

    strength = 1.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.strength, y


@loop("a dataset that the script changes before each epoch")
def changed_dataset(script: Script) -> None:
    model, dataset = perceptron(), Curriculum(*data().tensors)
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(dataset))
    for epoch in script.epochs():
        dataset.strength = 1.0 + epoch
        for batch in loader:
            optimizer.zero_grad()
            loss = error(model, batch)
            loss.backward()
            optimizer.step()
            script.print(loss)


@loop("labels that the body replaces in its dataset")
def replaced_labels(script: Script) -> None:
    model, dataset = perceptron(), data()
    labels = dataset.tensors[1]
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(dataset))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = error(model, batch)
            loss.backward()
            optimizer.step()
            script.print(loss)
        with torch.no_grad():
            labels.copy_(model(dataset.tensors[0]).argmax(1))


@loop("batches of a second loader, by `zip`")
def zipped(script: Script) -> None:
    model = perceptron()
    other = script.loader_of(TensorDataset(data().tensors[0].flip(0)))
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch, (unlabeled,) in zip(loader, other, strict=True):
            optimizer.zero_grad()
            loss = error(model, batch) + 0.1 * model(unlabeled).square().mean()
            loss.backward()
            optimizer.step()
            script.print(loss)


@loop("bfloat16 by autocast", tolerance=2e-2)
def bfloat16(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = error(model, batch)
            loss.backward()
            optimizer.step()
            script.print(loss)


@loop("float16 with a GradScaler and unscaled clipping", tolerance=2e-2)
def scaled(script: Script) -> None:
    model = perceptron()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    options = {} if script.body == "plain" else {"grad_scaler": scaler}
    model, optimizer, loader = script.prepare(model, sgd(model), **options)
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = error(model, batch)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            script.print(scaler.get_scale())


@loop("noise drawn in the body", is_random=True)
def noise(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = error(model, (inputs + torch.randn_like(inputs), targets))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            script.print(loss)


@loop("checkpointed activations")
def recomputed(script: Script) -> None:
    model: Any = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False)
            loss = F.cross_entropy(logits, targets)
            loss.backward()
            optimizer.step()
            script.print(loss)


@loop("parts of the model called by themselves")
def called_parts(script: Script) -> None:
    model: Any = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model[2](torch.tanh(model[0](inputs))), targets)
            loss.backward()
            optimizer.step()
            script.print(loss)


@loop("a penalty on parameters in the body")
def penalty(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = error(model, batch) + 1e-2 * sum(each.square().sum() for each in model.parameters())
            loss.backward()
            optimizer.step()
            script.print(loss)


@loop("evaluation in the middle of an epoch")
def evaluated(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
            if number == 1:
                model.eval()
                with torch.no_grad():
                    script.print(error(model, data().tensors))
                model.train()


@loop("a checkpoint of the script's own, stored and loaded in each epoch (own_resume_worker_lost.py)")
def own_checkpoint(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()
        stored = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=True)
        optimizer.load_state_dict(loaded["optimizer"])
        script.print(sum(each.sum() for each in loaded["model"].values()))


@loop("two trainings in one process (two_trainings.py)", is_random=True)
def two_trainings(script: Script) -> None:
    for rate in (0.1, 0.01):
        model = perceptron()
        model, optimizer, loader = script.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        train_with(script, model, optimizer, loader)
