"""Workers that differ in what must be equal are refused, and the message names what differs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from resile.training import seed
from resile_learner.state.facts import Facts, MembersDiffer, StateDiffers, check_members_agree, check_same_run
from resile_learner.state.run import RunState
from resile_learner.training.data.sources import plan_batches
from resile_learner.training.settings import TrainingSettings, facts_of

SETTINGS = TrainingSettings(epochs=4, batch_size=16, num_shards=2)


def model(value: int = 0) -> nn.Module:
    seed(value)
    return nn.Linear(2, 2)


def facts(
    settings: TrainingSettings = SETTINGS,
    *,
    samples: int = 1790,
    first: float = 0.0,
    validation: int = 10,
    built_with: int = 0,
    clip_grad_norm: float | None = 1.0,
) -> Facts:
    dataset = [first, *range(1, samples)]
    return facts_of(
        {**settings.facts(plan_batches(dataset, settings)), "clip_grad_norm": clip_grad_norm},
        model=model(built_with),
        dataset=dataset,
        num_validation_samples=validation,
        is_fast=settings.is_fast,
    )


def test_settings_of_torch_are_compared() -> None:
    expected = facts()
    torch.set_float32_matmul_precision("high")
    try:
        other = facts()
    finally:
        torch.set_float32_matmul_precision("highest")
    with pytest.raises(
        MembersDiffer, match=r"worker 1 has another `torch\.\S*precision\S*` than the others: .*Set it be"
    ):
        check_members_agree([expected, other, expected], [0, 1, 2])


def test_workers_that_agree_go_on() -> None:
    check_members_agree([facts(), facts()], [0, 1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (facts(replace(SETTINGS, epochs=5)), "worker 3 has another `epochs` than the others: 5 instead of 4. Pass"),
        (facts(replace(SETTINGS, seed=1)), "worker 3 has another `seed` than the others: 1 instead of 0. Pass"),
        (facts(replace(SETTINGS, mode="fast")), "another `mode` than the others: fast instead of same-bits. Pass"),
        (
            facts(clip_grad_norm=None),
            "worker 3 has another `clip_grad_norm` than the others: None instead of 1.0. Pass",
        ),
        (
            facts(samples=1797),
            "worker 3 loaded a different dataset than the others: 1797 samples instead of 1790. Make sure that the "
            "script reads the same data in every worker and on every host",
        ),
        (facts(first=0.5), "worker 3 loaded a different dataset than the others. Make sure"),
        (facts(validation=11), "loaded a different validation dataset than the others: 11 samples instead of 10. Make"),
        (
            facts(built_with=1),
            "worker 3 built a model with other initial parameters than the others. Call resile.training.seed() first",
        ),
        (
            facts() | {"device_class": "abacus"},
            "worker 3 has another class of device than the others: abacus instead of torch",
        ),
    ],
)
def test_the_fact_that_differs_is_named(other: Facts, message: str) -> None:
    with pytest.raises(MembersDiffer) as refused:
        check_members_agree([facts(), facts(), other], [1, 2, 3])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "name", ["optimizer_options", "schedules", "buffers", "extra_state", "inputs", "output_gradients", "state.best"]
)
def test_the_first_sentence_has_the_probable_cause_and_the_last_one_says_where_there_is_more(name: str) -> None:
    with pytest.raises(MembersDiffer) as refused:
        check_members_agree([{name: "1"}, {name: "1"}, {name: "2"}], [1, 2, 3])
    first, *_, last = str(refused.value).split(". ")
    assert first.startswith("worker 3 ")
    assert ", probably because " in first
    assert last.startswith("More: docs/")


@pytest.mark.parametrize("holder", [0, 2])
def test_a_fact_that_only_some_members_have_is_named(holder: int) -> None:
    known = [facts(), facts(), facts()]
    known[holder] |= {"selection": "accuracy"}
    message = f"worker {holder} has another `selection` than the others: accuracy instead of nothing"
    with pytest.raises(MembersDiffer, match=message):
        check_members_agree(known, [0, 1, 2])


def test_the_workers_that_differ_are_all_named() -> None:
    odd = facts(replace(SETTINGS, epochs=5))
    with pytest.raises(MembersDiffer, match=r"^workers 4, 5 have another `epochs` than the others: 5 instead of 4"):
        check_members_agree([facts(), odd, odd, facts(), facts()], [3, 4, 5, 6, 7])


def test_a_run_is_not_resumed_without_a_setting_that_it_had() -> None:
    with pytest.raises(StateDiffers, match="another `selection` than the run: nothing instead of accuracy"):
        check_same_run(facts(), facts() | {"selection": "accuracy"})


def test_a_run_is_not_resumed_with_another_setting() -> None:
    def state(facts: Facts) -> RunState:
        state = RunState(model(), {}, {}, after_load=lambda: None)
        state.facts = facts
        return state

    flat = state(facts()).flatten()
    state(facts()).load(flat.skeleton, flat.tensors)
    with pytest.raises(StateDiffers, match="this worker has another `epochs` than the run: 5 instead of 4"):
        state(facts(replace(SETTINGS, epochs=5))).load(flat.skeleton, flat.tensors)
