"""Situations of what scripts do besides: precision, noise, evaluation, checkpoints."""

import io
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import resile.training

from .situation import Script, data, error, loop, perceptron, sgd, train_with


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


@loop("BatchNorm over the whole batch, by `undivided()`")
def whole_batch_norm(script: Script) -> None:
    model: Any = nn.Sequential(perceptron(), nn.BatchNorm1d(4))
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            with resile.training.undivided():
                loss = F.cross_entropy(model(inputs), targets)
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
