"""``fit``, elastic: its loop over epochs and batches is one of `resile.training.prepare`.

Everything within (``train_step``, losses, metrics, the optimizer, callbacks, evaluation) is Keras' own code, which each
worker runs on whole batches; the calls of the model are divided. See docs/division.md.
"""

from typing import Any

import keras
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from torch.utils.data import IterableDataset

from resile.training import prepare
from resile.training.extend import default_num_shards
from resile_shared.errors import UsageError

from .callbacks import checked_callbacks, continue_files, save_on_lowest_rank
from .data import EpochHooks, first_batch, num_rows, training_loader
from .module import FitModule, as_tensors
from .progress import CompiledVariables, FitProgress


def elastic(
    model: keras.Model,
    *,
    num_shards: int | None = None,
    seed: int = 0,
    checkpoint_every: int | str | None = None,
    threads: int = 1,
) -> keras.Model:
    """Make the ``fit`` of a model elastic; returns the model.

    ``num_shards`` (None: as for `ElasticLoop`), ``seed``, ``checkpoint_every`` and ``threads`` are those of
    `resile.training.prepare`. Raises UsageError for what is no Keras model.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(f"elastic() takes a keras.Model, and was given a {type(model).__name__}")
    options = {"num_shards": num_shards, "seed": seed, "checkpoint_every": checkpoint_every, "threads": threads}
    vars(model)["fit"] = ElasticFit(model, options)
    return model


class ElasticFit:
    """Takes the place of a model's ``fit``."""

    def __init__(self, model: keras.Model, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options
        self._has_fitted = False

    def __call__(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> keras.callbacks.History:
        """Train on however many workers there are at the moment; the arguments and what it returns are Keras'.

        Raises UsageError for arguments that are not supported, and if it is called twice.
        """
        model = self._model
        self._check(epochs=epochs, initial_epoch=initial_epoch, steps_per_epoch=steps_per_epoch)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        loader = training_loader(
            x, y, batch_size=batch_size, sample_weight=sample_weight, class_weight=class_weight, shuffle=shuffle
        )
        batch = as_tensors(first_batch(loader))
        model._symbolic_build(data_batch=batch)
        held = checked_callbacks(callbacks, shows_progress=bool(verbose))
        validation = _Validation(
            model,
            validation_data,
            batch_size=validation_batch_size or batch_size,
            steps=validation_steps,
            frequency=validation_freq,
        )
        hooks = EpochHooks(loader, seed=self._options["seed"])
        fitting = _Fitting(model, held, validation, hooks)
        fitting.set_params(
            verbose=verbose,
            epochs=epochs,
            steps=None if isinstance(loader.dataset, IterableDataset) else len(loader),
            initial_epoch=initial_epoch,
        )
        options = {**self._options, "grad_scaler": CompiledVariables(model), "state": {"fit": fitting.progress}}
        if hooks.datasets and options["num_shards"] is None:  # each sample of the loader is a batch
            options["num_shards"] = default_num_shards(num_rows(batch))
        save_on_lowest_rank(model)
        fitting.run(prepare(fitting.module, [], loader, **options)[2])
        return fitting.history

    def _check(self, *, epochs: int, initial_epoch: int, steps_per_epoch: int | None) -> None:
        model = self._model
        model._assert_compile_called("fit")
        if self._has_fitted:
            raise UsageError("fit() was called twice: a script has one training call; raise `epochs` to train longer")
        if model.jit_compile:
            raise UsageError(
                "the model was compiled with jit_compile=True, and each worker would choose kernels by itself: leave "
                "it out"
            )
        if steps_per_epoch is not None:
            raise UsageError(
                "fit() was given steps_per_epoch, and an epoch uses every sample once: leave it out, and give fewer "
                "samples for shorter epochs"
            )
        if epochs <= initial_epoch:
            raise UsageError(f"epochs is {epochs}, and initial_epoch {initial_epoch}: there is nothing to train")
        self._has_fitted = True


class _Validation:
    """The validation at the end of epochs, which every worker computes in full."""

    def __init__(
        self, model: keras.Model, data: Any, *, batch_size: int | None, steps: int | None, frequency: Any
    ) -> None:
        self._model = model
        self._data = None if data is None else unpack_x_y_sample_weight(data)
        self._batch_size = batch_size
        self._steps = steps
        self._frequency = frequency

    def logs(self, epoch: int, callbacks: Any) -> dict[str, Any]:
        """Return the results of ``epoch``, if it ends with a validation."""
        if self._data is None or not self._model._should_eval(epoch, self._frequency):
            return {}
        x, y, sample_weight = self._data
        results = self._model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=self._batch_size,
            steps=self._steps,
            callbacks=callbacks,
            return_dict=True,
        )
        return {f"val_{name}": value for name, value in results.items()}


class _Fitting:
    """What ``fit`` does in each batch and around epochs, on every worker."""

    def __init__(
        self, model: keras.Model, held: list[keras.callbacks.Callback], validation: _Validation, hooks: EpochHooks
    ) -> None:
        self._model = model
        self._callbacks = keras.callbacks.CallbackList(held, add_history=True, model=model)
        self._callbacks._async_train = self._callbacks._async_test = False  # in threads they would change the state
        self._validation = validation
        self._hooks = hooks
        self._logs: dict[str, Any] = {}
        self._epochs = self._initial_epoch = 0
        self.module = FitModule(model, holds=hooks.datasets)
        self.progress = FitProgress(model, self._callbacks)

    def set_params(self, *, epochs: int, initial_epoch: int, **params: Any) -> None:
        """Set what callbacks know of the training call."""
        self._epochs, self._initial_epoch = epochs, initial_epoch
        self._callbacks.set_params({"epochs": epochs, **params})

    @property
    def history(self) -> keras.callbacks.History:
        """The results of all epochs."""
        history: keras.callbacks.History = self._model.history
        return history

    def run(self, loader: Any) -> None:
        """Train."""
        self._model.stop_training = False
        # No variable here may hold the model: it would travel, as variables of a script's loop do.
        for epoch in loader.epochs(self._epochs - self._initial_epoch, start=self._initial_epoch):
            self._begin_epoch(epoch)
            for batch in loader:
                self._train(batch)
                if self._model.stop_training:
                    break
            self._end_epoch(epoch)
            if self._model.stop_training:
                loader.stop()
        self._begin()  # a worker that joins after the last iteration trains none

    def _begin(self) -> None:
        """Training begins on this worker, if it has not."""
        if not self.progress.has_begun:
            if self.progress.epoch >= 0:
                continue_files(self._callbacks)
            self._callbacks.on_train_begin()
            self.progress.begin()

    def _begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless what was received from other workers is from within it."""
        progress = self.progress
        self._begin()
        self._hooks.begin(epoch - self._initial_epoch)
        if progress.epoch != epoch:
            progress.epoch, progress.step = epoch, 0
            self._model.reset_metrics()
            self._callbacks.on_epoch_begin(epoch)
        self._model.train()

    def _train(self, batch: Any) -> None:
        """Train with a batch."""
        step = self.progress.step
        self._callbacks.on_train_batch_begin(step)
        self.module.reseed()
        with self.module.dividing():
            self._logs = self._model.train_step(as_tensors(batch))
        self.progress.step += 1
        self._callbacks.on_train_batch_end(step, self._logs)

    def _end_epoch(self, epoch: int) -> None:
        """End an epoch, and with the last one the training: its callbacks may change the model."""
        model = self._model
        logs = dict(model._get_metrics_result_or_logs(self._logs))
        model.eval()
        logs |= self._validation.logs(epoch, self._callbacks)
        self._callbacks.on_epoch_end(epoch, logs)
        if model.stop_training or epoch + 1 == self._epochs:
            if isinstance(model.optimizer, keras.optimizers.Optimizer):
                model.optimizer.finalize_variable_values(model.trainable_weights)
            self._callbacks.on_train_end(logs)
