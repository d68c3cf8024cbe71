"""The variables of a Keras model as parameters and buffers of an ``nn.Module``, and its calls as those of one.

On the torch backend a Keras model is an ``nn.Module``, but all of its variables are parameters: running statistics and
the states of random generators too, which workers have to treat otherwise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.random.seed_generator import global_seed_generator
from keras.src.utils.torch_utils import TorchModuleWrapper
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from resile_shared.errors import UsageError

_MOST = 2**31 - 1


class KerasModule(nn.Module):
    """A built Keras ``model`` for `resile.training.prepare`: ``forward`` calls it.

    Trainable variables are its parameters, others its buffers; both are the model's own memory. Each call seeds the
    model's random generators from torch's, which Resile seeds for each shard. ``holds`` are further objects that do not
    travel as variables of the script. Raises UsageError for a model that is not built, and for one that keeps a state
    for each row of a batch.
    """

    is_random = True
    """Layers may draw random numbers, and BatchNormalization has batch statistics, in training mode."""

    def __init__(self, model: keras.Model, *, holds: Sequence[Any] = ()) -> None:
        super().__init__()
        layers = model._flatten_layers()
        if unbuilt := [layer.name for layer in layers if not layer.built]:
            raise UsageError(
                f"the layer {unbuilt[-1]} of the model is not built, so that its variables are not known: call the "
                "model on a batch first, or give it an Input; leave out a layer that it does not use"
            )
        self.holds = [*layers, *holds]  # no submodules, since they are in a list
        self._generators = [generator for layer in layers for generator in layer._seed_generators]
        self._names: set[str] = set()
        known: set[int] = set()
        for layer in layers:
            if getattr(layer, "stateful", False):
                raise UsageError(
                    f"the layer {layer.name} is stateful, and keeps a state for each row of a batch, of which a worker "
                    "computes only some: use stateful=False, and longer sequences"
                )
            if isinstance(layer, TorchModuleWrapper):
                self.add_module(self._named(layer.path), layer.module)
                known.update(id(variable) for variable in layer.variables)
                continue
            if isinstance(layer, keras.layers.BatchNormalization) and id(layer.moving_mean) not in known:
                self.add_module(self._named(layer.path), _statistics(layer))
                known.update((id(layer.moving_mean), id(layer.moving_variance)))
            self._register(layer, known)

    @property
    def model(self) -> keras.Model:
        """The Keras model."""
        return self.holds[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, in training mode if this module is."""
        self.reseed()
        return self.model(*args, **self._with_mode(kwargs))

    @torch.no_grad()
    def reseed(self) -> None:
        """Seed the random generators of the model, and the one that Keras uses without a seed, from torch's."""
        generators = [*self._generators, global_seed_generator()]
        for generator, seed in zip(generators, torch.randint(_MOST, (len(generators),)).tolist(), strict=True):
            generator.state.value.copy_(torch.tensor([seed, 0]))

    def _with_mode(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not self.model._call_has_training_arg:
            return kwargs
        return {**kwargs, "training": self.training and kwargs.get("training") is not False}

    def _register(self, layer: Any, known: set[int]) -> None:
        """Register the layer's own variables that are not registered yet."""
        of_generators = {id(generator.state) for generator in layer._seed_generators}
        for variable in layer._trainable_variables:
            if id(variable) not in known:
                known.add(id(variable))
                self.register_parameter(self._named(variable.path), variable.value)
        for variable in layer._non_trainable_variables:
            if id(variable) not in known | of_generators:
                known.add(id(variable))
                self.register_buffer(self._named(variable.path), variable.value)

    def _named(self, path: str) -> str:
        """A name that is not used yet, as PyTorch takes it."""
        usual = name = path.replace(".", "_")
        number = 1
        while name in self._names:
            name, number = f"{usual}_{number}", number + 1
        self._names.add(name)
        return name


class FitModule(KerasModule):
    """A `KerasModule` that returns what ``fit`` needs beside the outputs: their masks, and losses added by layers.

    Within `dividing` calls of the Keras model itself, as in its ``train_step``, go through this module.
    """

    _is_in_model = False

    @contextmanager
    def dividing(self) -> Iterator[None]:
        """In this context calls of the model are those of this module."""
        model = self.model
        attributes, usual = vars(model), model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return usual(*args, **kwargs) if self._is_in_model else self._call_whole(args, kwargs)

        attributes["forward"] = forward
        try:
            yield
        finally:
            del attributes["forward"]

    def _call_whole(self, args: Any, kwargs: Any) -> Any:
        """Call the model with all rows of a batch, from within its own call."""
        leaves, spec = tree_flatten((args, kwargs))  # as arguments of their own: a list might be one of samples
        outputs, masks, losses = self(spec, *leaves)
        self.reseed()  # whichever shards were computed here
        for output, mask in zip(tree_flatten(outputs)[0], masks, strict=True):
            if mask is not None:
                set_keras_mask(output, mask)
        self.model._clear_losses()
        self.model._losses.extend(losses)
        self.model._loss_ids.update(map(id, losses))
        return outputs

    def forward(self, spec: TreeSpec, *leaves: Any) -> Any:
        """Call the model; return its outputs, the mask of each, and the losses that layers have added."""
        args, kwargs = tree_unflatten(leaves, spec)
        self.model._clear_losses()
        self._is_in_model = True
        try:
            outputs = super().forward(*args, **kwargs)
        finally:
            self._is_in_model = False
        masks = [get_keras_mask(each) for each in tree_flatten(outputs)[0]]
        losses = [loss for layer in self.model._flatten_layers() for loss in layer._get_own_losses()]
        self.model._clear_losses()
        return outputs, masks, losses


def as_tensors(batch: Any) -> Any:
    """Return a batch with tensors in place of arrays."""
    return tree_map(lambda each: each if each is None or isinstance(each, Tensor) else _tensor(each), batch)


def _tensor(value: Any) -> Tensor:
    tensor: Tensor = keras.ops.convert_to_tensor(value)
    return tensor


def _statistics(layer: Any) -> nn.Module:
    """The moving statistics of a BatchNormalization, as buffers of a module that Resile knows."""
    module = nn.BatchNorm1d(len(layer.moving_mean.value), affine=False)
    module._buffers.clear()
    module.register_buffer("running_mean", layer.moving_mean.value)
    module.register_buffer("running_var", layer.moving_variance.value)
    return module
