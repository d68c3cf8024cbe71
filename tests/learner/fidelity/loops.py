"""Situations of loops: gradients, schedules, averages, and steps of a kind of their own."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from .situation import EPOCHS, Script, data, error, loop, norm_of, perceptron, script_state, sgd, train_with


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
