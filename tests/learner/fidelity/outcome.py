"""Runs a situation in each way, and says whether it computes what the plain loop computes."""

import gc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from resile.training import ElasticLoop, ElasticModel
from resile_learner.messages import Message, Ready, Warned
from resile_learner.session import SoloSession, enter_session
from resile_learner.state.run import RunState
from resile_learner.training.division.additivity import IN_FULL
from resile_shared.errors import ResileError

from .situation import BATCH, EPOCHS, SHARDS, Body, Parts, Script, Situation, sgd

EQUAL, EQUAL_IN_FULL, RANDOM = "equal", "equal, in full", "other random numbers"
NAMED, NAMED_LATE, DIFFERS, FALSE_ALARM = "named: ", "**named late:** ", "**differs**", "**equal, but warned of:** "
"""The last three are faults."""
_OF_JOINERS = "a worker that joins"
"""In warnings of what has nothing to do with what is computed here."""
NUM_WORDS = 12
"""So many words of a message tell which one it is."""


class Trained(NamedTuple):
    state: Mapping[str, Tensor]
    printed: list[float] | None
    """None in ways in which a script prints what belongs to shards, or nothing."""


class Early(SoloSession):
    """A session that keeps what is reported before the second iteration is complete."""

    def __init__(self, *, is_always: bool = False) -> None:
        super().__init__()
        self._is_always = is_always
        self._state: RunState | None = None
        self.warnings: list[str] = []

    def join(self, ready: Ready, state: RunState) -> bool:
        self._state = state
        return super().join(ready, state)

    @property
    def differing(self) -> list[str]:
        """Warnings of what is not equal."""
        return [each for each in self.warnings if IN_FULL not in each]

    @property
    def is_early(self) -> bool:
        return self._is_always or self._state is None or self._state.progress.iteration <= 1

    def report(self, message: Message) -> None:
        if isinstance(message, Warned) and self.is_early and _OF_JOINERS not in message.message:
            self.warnings.append(message.message)


def outcomes(situation: Situation) -> dict[str, str]:
    """The outcome in each way; only those with a usual loop have all ways."""
    found = {
        "batch": _outcome(situation, lambda: _by_script(situation, "batch"), _plain(situation)),
        "shard": _outcome(situation, lambda: _by_script(situation, "shard"), _plain(situation)._replace(printed=None)),
    }
    if (parts := situation.parts) is not None:
        size = len(parts.data())
        whole = _plain(situation, batch_size=size)._replace(printed=None)
        found["ElasticLoop"] = _outcome(situation, lambda: _by_loop(parts), _plain(situation)._replace(printed=None))
        if not situation.needs_order:
            found["ElasticModel"] = _outcome(situation, lambda: _by_model(parts, batch_size=size), whole)
    return found


def draws(situation: Situation) -> bool:
    """Whether the plain loop draws random numbers while it trains."""
    one, other = (_plain(situation, seed=seed) for seed in range(2))
    return not _is_equal(one, other, tolerance=0.0)


def _outcome(situation: Situation, train: Callable[[], Trained], expected: Trained) -> str:
    session = Early(is_always=situation.begins_late)
    try:
        found = _within(session, train)
    except Exception as error:
        if named := session.differing:
            return NAMED + _beginning(named[0])
        kind = "" if isinstance(error, ResileError) else f"{type(error).__name__}: "
        return (NAMED if session.is_early else NAMED_LATE) + kind + _beginning(str(error))
    finally:
        gc.collect()  # a run that an error has ended restores settings of PyTorch
    named = session.differing
    if situation.is_random:
        return RANDOM if _is_equal(found, _within(Early(), train), tolerance=0.0) else DIFFERS
    if _is_equal(found, expected, tolerance=situation.tolerance):
        if named:
            return FALSE_ALARM + _beginning(named[0])
        return EQUAL_IN_FULL if session.warnings else EQUAL
    return NAMED + _beginning(named[0]) if named else DIFFERS


def _within(session: SoloSession, train: Callable[[], Trained]) -> Trained:
    def run() -> Trained:
        enter_session(session)
        torch.manual_seed(0)
        return train()

    with ThreadPoolExecutor(1) as thread:  # on whose stack no loop of a test is around the training call
        return thread.submit(Context().run, run).result()


def _plain(situation: Situation, *, batch_size: int = BATCH, seed: int = 0) -> Trained:
    return _within(SoloSession(), lambda: _by_script(situation, "plain", batch_size=batch_size, seed=seed))


def _by_script(situation: Situation, body: Body, *, batch_size: int = BATCH, seed: int = 0) -> Trained:
    script = Script(body, batch_size=batch_size, seed=seed)
    situation.run(script)
    return Trained(_state(*script.models), None if body == "shard" else script.printed)


def _by_loop(parts: Parts) -> Trained:
    model = parts.model()
    optimizer = sgd(model)
    loop = ElasticLoop(
        model, optimizer, parts.data(), epochs=EPOCHS, batch_size=BATCH, num_shards=SHARDS, shuffle=False
    )
    for iteration in loop:
        for inputs, targets in iteration.shards():
            iteration.backward(parts.loss(model(inputs), targets))
        if iteration.exchange():
            optimizer.step()
    return Trained(_state(model), None)


def _by_model(parts: Parts, *, batch_size: int) -> Trained:
    """ElasticModel shuffles, so that each epoch is one batch."""
    model = parts.model()
    elastic = ElasticModel(model, lambda: (parts.data(), None), parts.loss, sgd(model))
    elastic.train(EPOCHS, batch_size, num_shards=SHARDS)
    return Trained(_state(model), None)


def _state(*models: nn.Module) -> dict[str, Tensor]:
    return {
        f"{place}.{name}": value.detach().clone()
        for place, model in enumerate(models)
        for name, value in model.state_dict().items()
    }


def _is_equal(found: Trained, expected: Trained, *, tolerance: float) -> bool:
    if found.state.keys() != expected.state.keys():
        return False
    if expected.printed is not None and found.printed is not None:
        if len(found.printed) != len(expected.printed):
            return False
        if found.printed != pytest.approx(expected.printed, rel=10 * tolerance, abs=tolerance, nan_ok=True):
            return False
    return all(
        torch.allclose(found.state[name].double(), value.double(), rtol=10 * tolerance, atol=tolerance, equal_nan=True)
        for name, value in expected.state.items()
    )


def _beginning(message: str) -> str:
    words = message.split()
    return " ".join(words[:NUM_WORDS]) + ("..." if len(words) > NUM_WORDS else "")
