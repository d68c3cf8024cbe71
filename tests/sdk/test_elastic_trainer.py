"""ElasticTrainer: what a Trainer computes, and every argument either works or is refused by name."""

import dataclasses
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from resile.integrations.requirements import require
from resile.integrations.transformers import ElasticTrainer
from resile.integrations.transformers.arguments import _DETERMINING, _REFUSED, check_arguments
from resile.integrations.transformers.progress import TrainerProgress
from resile.integrations.transformers.step import follow_rank
from resile_learner.messages import Message, Warned
from resile_learner.session import SoloSession, enter_session
from resile_learner.state.flat import flatten, unflatten
from resile_shared.errors import UsageError

from .late_joiner import train_and_join_late

WITHOUT_EFFECT_ON_BITS = """
    output_dir torch_empty_cache_steps average_tokens_across_devices tf32 activation_checkpointing_kwargs
    gradient_checkpointing gradient_checkpointing_kwargs liger_kernel_config use_cache logging_strategy
    logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model
    save_strategy save_steps save_total_limit hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision restore_callback_states_from_checkpoint seed data_seed use_cpu accelerator_config
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    do_train do_eval do_predict resume_from_checkpoint local_rank
"""
"""Arguments that an elastic run keeps, or that concern processes which it does not have."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A plain Trainer takes all cores, which other tests need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    usual = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**usual, **more})


def padded(size: int = 20) -> list[dict[str, list[int]]]:
    """Pieces of text whose labels are of different numbers, as padding makes them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (size, 12), generator=generator).tolist()
    return [{"input_ids": row, "labels": row[: 2 + i % 10] + [-100] * (10 - i % 10)} for i, row in enumerate(tokens)]


def gpt() -> nn.Module:
    torch.manual_seed(0)
    size = {"vocab_size": 50, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0))
    assert isinstance(model, nn.Module)
    return model


def alone(call: Callable[[], Any]) -> Any:
    """Run ``call`` as a script of its own, with its one training call."""
    return Context().run(call)


def trained(trainer: Trainer) -> list[torch.Tensor]:
    alone(trainer.train)
    return [parameter.detach() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("more", "num_shards"),
    [
        ({}, 4),
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}, None),
        ({"max_steps": 4, "label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}, 2),
        ({"dataloader_drop_last": True, "max_grad_norm": 0.1}, 2),
        ({"bf16": True, "warmup_steps": 2, "optim": "sgd"}, 2),
        ({"activation_checkpointing": True, "num_train_epochs": 1.5, "optim": "adamw_torch"}, 4),
        ({"average_tokens_across_devices": False, "max_grad_norm": 0.0}, 4),
    ],
)
def test_the_parameters_are_those_of_a_trainer(more: dict[str, Any], num_shards: int | None, tmp_path: Path) -> None:
    """Also where padding makes some shards weigh more than others. Equal but for the order of additions."""
    plain = Trainer(gpt(), arguments(tmp_path / "a", **more), train_dataset=padded())
    elastic = ElasticTrainer(gpt(), arguments(tmp_path / "b", **more), train_dataset=padded(), num_shards=num_shards)
    tolerance = 5e-3 if more.get("bf16") else 1e-4
    for expected, parameter in zip(trained(plain), trained(elastic), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=tolerance, atol=tolerance)
    assert elastic.state.global_step == plain.state.global_step
    assert elastic.state.epoch == pytest.approx(plain.state.epoch)
    assert elastic.result is not None
    assert elastic.result.iterations == plain.state.global_step


@pytest.mark.parametrize("optimizer", ["adafactor", "rmsprop", "adagrad"])
def test_an_optimizer_that_amplifies_rounding_has_the_loss_of_a_trainer(optimizer: str, tmp_path: Path) -> None:
    plain = Trainer(gpt(), arguments(tmp_path / "a", optim=optimizer), train_dataset=padded())
    elastic = ElasticTrainer(gpt(), arguments(tmp_path / "b", optim=optimizer), train_dataset=padded(), num_shards=4)
    expected, outcome = alone(plain.train), alone(elastic.train)
    assert outcome.training_loss == pytest.approx(expected.training_loss, rel=1e-3)


def test_the_log_is_that_of_a_trainer(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "logging_steps": 2,
        "eval_strategy": "epoch",
        "include_num_input_tokens_seen": True,
        "eval_on_start": True,
        "logging_first_step": True,
    }
    logs = []
    for number, kind in enumerate((Trainer, ElasticTrainer)):
        args = arguments(tmp_path / str(number), **more)
        trainer = kind(gpt(), args, train_dataset=padded(), eval_dataset=padded(6))
        trained(trainer)
        logs.append(
            [
                {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_second", "_time"))}
                for entry in trainer.state.log_history
            ]
        )
    assert [entry.keys() for entry in logs[1]] == [entry.keys() for entry in logs[0]]
    for mine, theirs in zip(logs[1], logs[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("name", _REFUSED)
def test_an_argument_that_cannot_hold_is_refused_by_name(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, False if name == "skip_memory_metrics" else "something")
    with pytest.raises(UsageError, match=f"does not take {name}="):
        check_arguments(args)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"fp16": True}, "fp16"),
    ],
)
def test_a_value_that_cannot_hold_is_refused_by_name(more: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named):
        ElasticTrainer(gpt(), arguments(tmp_path, **more), train_dataset=padded())


def test_every_argument_of_this_version_is_decided() -> None:
    """A new one has to be tried first."""
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields == set(_REFUSED) | set(_DETERMINING) | set(WITHOUT_EFFECT_ON_BITS.split())


def test_an_argument_of_a_trainer_that_is_left_out_means_the_same(tmp_path: Path) -> None:
    check_arguments(TrainingArguments(output_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("loss", "fits"),
    [
        (lambda outputs, num_items: outputs["logits"].square().mean(), "a mean"),
        (lambda outputs, num_items: outputs["logits"].square().sum() / num_items, "divided by the items"),
        (lambda outputs, num_items: outputs["logits"].square().sum(), "sum over its batch"),
        (lambda outputs, num_items: outputs["logits"].square().mean() * (1 + 1 / num_items), "override compute_loss"),
    ],
)
def test_a_loss_of_the_script_is_weighted_as_it_is_computed(
    loss: Callable[[Any, Any], Any], fits: str, tmp_path: Path
) -> None:
    class Custom(Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(inputs["input_ids"])
            value = loss(outputs, num_items_in_batch if num_items_in_batch is not None else 1)
            return (value, outputs) if return_outputs else value

    class Elastic(Custom, ElasticTrainer):
        pass

    whole = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in padded()]
    elastic = Elastic(gpt(), arguments(tmp_path), train_dataset=whole, num_shards=4)
    if fits not in ("a mean", "divided by the items"):
        with pytest.raises(UsageError, match=fits):
            alone(elastic.train)
        return
    plain = Custom(gpt(), arguments(tmp_path), train_dataset=whole)
    for expected, parameter in zip(trained(plain), trained(elastic), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-3)


BATCHES = [[3, 4], [0, 1, 2, 5, 6, 7, 8, 9], [19], [10, 11, 12, 13, 14], [15, 16, 17, 18]]


def batched(kind: type[Trainer]) -> type[Trainer]:
    """A Trainer whose script makes the loader, with batches of its own."""

    class Batched(kind):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.train_dataset, batch_sampler=BATCHES, collate_fn=self.data_collator)

    return Batched


@pytest.mark.parametrize("num_shards", [None, 4])
def test_a_loader_of_the_script_may_have_a_batch_sampler(num_shards: int | None, tmp_path: Path) -> None:
    plain = batched(Trainer)(gpt(), arguments(tmp_path / "a"), train_dataset=padded())
    elastic = batched(ElasticTrainer)(gpt(), arguments(tmp_path / "b"), train_dataset=padded(), num_shards=num_shards)
    for expected, parameter in zip(trained(plain), trained(elastic), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-4)
    assert elastic.state.global_step == plain.state.global_step == 2 * len(BATCHES)


class Streaming(ElasticTrainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=4, collate_fn=self.data_collator)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(padded())


class EndsEpoch(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_epoch_stop = True


class StepsTwice(ElasticTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        super().training_step(model, dict(inputs), num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda make: make().train(resume_from_checkpoint="checkpoint-3"), "resume_from_checkpoint is 'checkpoint-3'"),
        (lambda make: make().train(resume_from_checkpoint=True), "in a plain run"),
        (lambda make: make().train(trial={"learning_rate": 1}), "does not take trials"),
        (lambda make: make().hyperparameter_search(), "no hyperparameter_search"),
        (lambda make: make(callbacks=[EndsEpoch]).train(), "should_epoch_stop"),
        (lambda make: make(train_dataset=Stream(), max_steps=3).train(), "iterable, not map-style"),
        (lambda make: make(kind=Streaming).train(), "iterable, not map-style"),
        (
            lambda make: make(kind=batched(ElasticTrainer), gradient_accumulation_steps=2).train(),
            "gradient_accumulation_steps is 2, and the training loader has a batch sampler",
        ),
        (lambda make: make(kind=StepsTwice).train(), "called backward\\(\\) 2 times"),
        (
            lambda make: make(train_dataset=[{"input_ids": [1, 2], "labels": [-100, -100]}] * 9).train(),
            "does not tell whether it is a mean",
        ),
        (
            lambda make: make(
                train_dataset=padded(8) + [{"input_ids": [1] * 12, "labels": [-100] * 12}] * 9, num_shards=1
            ).train(),
            "no labels but -100",
        ),
    ],
)
def test_what_cannot_work_is_refused(call: Callable[[Any], Any], named: str, tmp_path: Path) -> None:
    def make(
        kind: type[ElasticTrainer] = ElasticTrainer,
        train_dataset: Any = None,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        **more: Any,
    ) -> ElasticTrainer:
        args = arguments(tmp_path, max_steps=max_steps, gradient_accumulation_steps=gradient_accumulation_steps)
        return kind(gpt(), args, train_dataset=train_dataset or padded(), **more)

    with pytest.raises(UsageError, match=named):
        alone(lambda: call(make))


class Counts(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.began = ""
        self.steps = [0]

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        self.steps[0] += 1


def test_callbacks_of_a_joiner_know_what_those_of_the_others_noted(tmp_path: Path) -> None:
    """But not what they noted when their own worker began, such as the time."""
    trainers = []
    for name in ("donor", "joiner"):
        counts, stopping = Counts(), EarlyStoppingCallback(early_stopping_patience=3)
        trainer = ElasticTrainer(gpt(), arguments(tmp_path), train_dataset=padded(), callbacks=[counts, stopping])
        trainer._begin_counting()
        counts.began = name
        trainers.append((trainer, counts, stopping))
    donor, counts, stopping = trainers[0]
    donor._progress.begin()
    counts.steps[0], stopping.early_stopping_patience_counter, donor.state.best_metric = 5, 2, 0.25
    donor.state.log_history.append({"loss": 1.0, "train_runtime": 7.0})
    state = flatten(donor._progress.state_dict())

    joiner, counts, stopping = trainers[1]
    joiner._progress.load_state_dict(unflatten(state.skeleton, state.tensors))
    joiner._progress.begin()
    assert (counts.steps, counts.began, stopping.early_stopping_patience_counter) == ([5], "joiner", 2)
    assert joiner.state.best_metric == 0.25
    assert joiner.state.log_history == [{"loss": 1.0}]


class Recording(SoloSession):
    """A session that keeps what is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def report(self, message: Message) -> None:
        if isinstance(message, Warned):
            self.warnings.append(message.message)


def test_callbacks_that_differ_between_workers_are_named_and_not_refused(tmp_path: Path) -> None:
    """Here each worker is one object: what a second one knows makes another mean of the digests."""

    def progress_of(name: str) -> tuple[TrainerProgress, Counts]:
        counts = Counts()
        trainer = ElasticTrainer(
            gpt(), arguments(tmp_path), train_dataset=padded(), callbacks=[counts, ProgressCallback]
        )
        trainer._begin_counting()
        counts.began = name  # before training: each worker's own
        trainer._progress.begin()
        return trainer._progress, counts

    def compare() -> list[str]:
        session = Recording()
        digests = [progress.scalars(10)["resile/callbacks"] for progress, _ in (mine, other)]
        means = {"loss": 1.0, "resile/callbacks": 0.3 * digests[0] + 0.7 * digests[1]}

        def call() -> None:
            enter_session(session)
            mine[0].compare(means)

        Context().run(call)
        assert means == {"loss": 1.0}
        return session.warnings

    mine, other = progress_of("mine"), progress_of("other")
    assert mine[0].scalars(11) == {}
    assert compare() == []
    mine[1].steps[0] = other[1].steps[0] = 10
    assert compare() == []
    mine[1].last = "/tmp/7"  # type: ignore[attr-defined]
    assert [text.partition(":")[0] for text in compare()] == [
        "attributes of callbacks differ between workers, among Counts.steps, Counts.last"
    ]


def test_a_trainer_compares_its_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = TrainerProgress.compare

    def recorded(progress: TrainerProgress, means: dict[str, float]) -> None:
        compared.append("resile/callbacks" in means)
        compare(progress, means)

    monkeypatch.setattr(TrainerProgress, "compare", recorded)
    trainer = ElasticTrainer(gpt(), arguments(tmp_path, max_steps=2), train_dataset=padded(), callbacks=[Counts()])
    alone(trainer.train)
    assert compared == [False, True]
    assert trainer.result is not None
    assert not trainer.result.metrics


class Phases(Counts):
    def on_train_begin(self, *arguments: Any, **more: Any) -> None:
        self.began = "here"
        self.steps = [0]

    def on_train_end(self, *arguments: Any, **more: Any) -> None:
        assert self.began == "here"


def test_callbacks_of_a_worker_that_joins_when_training_is_over_know_all_the_same(tmp_path: Path) -> None:
    phases = Phases(), Phases()
    donor, joiner = (
        ElasticTrainer(gpt(), arguments(tmp_path / str(number)), train_dataset=padded(), callbacks=[each])
        for number, each in enumerate(phases)
    )
    train_and_join_late(donor.train, joiner.train)
    assert phases[0].steps == phases[1].steps == [6]
    assert joiner.state.global_step == 6
    assert joiner.state.log_history[-1]["train_loss"] == donor.state.log_history[-1]["train_loss"]
    assert all(map(torch.equal, donor.model.parameters(), joiner.model.parameters()))


def test_the_model_is_saved_and_the_best_one_loaded_as_a_trainer_does(tmp_path: Path) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "load_best_model_at_end": True}
    args = arguments(tmp_path, **more, learning_rate=0.3, num_train_epochs=1)
    trainer = ElasticTrainer(gpt(), args, train_dataset=padded(), eval_dataset=padded(5))
    parameters = [parameter.clone() for parameter in trained(trainer)]
    scores = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert min(scores) < scores[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(scores))
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", Path(trainer.state.best_model_checkpoint)):
        loaded = GPT2LMHeadModel.from_pretrained(folder)
        assert all(map(torch.equal, loaded.parameters(), parameters))


def test_only_the_lowest_rank_writes_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoloSession, "view", dataclasses.replace(SoloSession.view, workers=(7, 0)))
    trainer = ElasticTrainer(gpt(), arguments(tmp_path), train_dataset=padded())
    alone(lambda: follow_rank(trainer))
    try:
        trainer.save_model(str(tmp_path / "saved"))
        assert not (tmp_path / "saved").exists()
        assert not trainer.is_world_process_zero()
        assert not trainer.state.is_world_process_zero
    finally:
        monkeypatch.undo()
        alone(lambda: follow_rank(trainer))
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_reports_are_written_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "curves"))
    trained(ElasticTrainer(gpt(), arguments(tmp_path, report_to="tensorboard"), train_dataset=padded()))
    assert list((tmp_path / "curves").rglob("events.*"))


@pytest.mark.parametrize(
    ("library", "below", "named"), [("nowhere", "1", "is not installed"), ("torch", "1.0", "torch")]
)
def test_a_library_that_is_missing_or_of_another_version_is_named(library: str, below: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        require(library, minimum="0.1", below=below)
