"""Situations of loops with several models, optimizers or passes, and of those that skip some."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .situation import Script, error, loop, norm_of, perceptron, script_state, sgd


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


@loop("parameters added to the optimizer in a later epoch", begins_late=True)
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
