"""The training data of ``fit`` as a DataLoader, whose batches are those that Keras would make."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset, PyDatasetAdapter
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resile.training.extend import read_loader, seeded
from resile_shared.errors import UsageError


def training_loader(
    x: Any, y: Any, *, batch_size: int | None, sample_weight: Any, class_weight: Any, shuffle: Any
) -> DataLoader[Any]:
    """Return a loader of whole batches ``(x, y, sample_weight)``. Raises UsageError for data that cannot be divided."""
    if isinstance(x, DataLoader):
        get_data_adapter(x, y, sample_weight, class_weight=class_weight)  # raises for what it does not take
        return x
    if shuffle not in (True, False):
        raise UsageError(f"fit() was given shuffle={shuffle!r}: use True or False")
    adapter = get_data_adapter(
        x, y, sample_weight, batch_size=batch_size, shuffle=bool(shuffle), class_weight=class_weight
    )
    if isinstance(adapter, ArrayDataAdapter):
        rows = _Rows(adapter)
        return DataLoader(rows, adapter.batch_size, shuffle=bool(shuffle), collate_fn=rows.batch)
    if isinstance(adapter, PyDatasetAdapter) and adapter.py_dataset.num_batches is not None:
        return DataLoader(_Batches(adapter), batch_size=1, shuffle=bool(shuffle), collate_fn=_only)
    raise UsageError(
        f"fit() was given a {type(x).__name__}, whose samples have no numbers: give it arrays, a keras.utils.PyDataset "
        "with a length, or a torch.utils.data.DataLoader"
    )


def first_batch(loader: DataLoader[Any]) -> Any:
    """Return some batch, to build a model with: on all workers the same."""
    if isinstance(loader.dataset, IterableDataset):
        return next(iter(loader))
    read = read_loader(loader)
    samples = range(min(read.batch_size or 1, len(read.dataset)))
    with seeded(0):
        return read.collate_fn([read.dataset[index] for index in samples])


def num_rows(batch: Any) -> int:
    """The number of samples in a batch."""
    return next(len(leaf) for leaf in tree_flatten(batch)[0] if leaf is not None)


class EpochHooks:
    """The hooks of a PyDataset around epochs, which may shuffle it: called as often on a worker that joins."""

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        self.datasets = [loader.dataset.py_dataset] if isinstance(loader.dataset, _Batches) else []
        """The PyDataset, if the data is one."""
        self._seed = seed
        self._num_begun = 0

    def begin(self, epoch: int) -> None:
        """The epoch with this number, from 0, begins."""
        for number in range(self._num_begun, epoch + 1):
            for dataset in self.datasets:
                with seeded(self._seed + number):
                    dataset.on_epoch_end()  # Keras calls it before the first epoch, too
                    dataset.on_epoch_begin()
        self._num_begun = epoch + 1


class _Row:
    """A sample: its number, and its content if somebody wants to compare it."""

    def __init__(self, index: int, arrays: Sequence[Any]) -> None:
        self.index = index
        self._arrays = arrays

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        rows = [np.asarray(each.convert_to_numpy(each[[self.index]])) for each in self._arrays]
        return np.frombuffer(b"".join(row.tobytes() for row in rows), np.uint8)


class _Rows(Dataset[_Row]):
    """The rows of arrays."""

    def __init__(self, adapter: ArrayDataAdapter) -> None:
        self._arrays = convert_to_sliceable(adapter._inputs, target_backend="torch")
        self._leaves = [leaf for leaf in tree_flatten(self._arrays)[0] if leaf is not None]
        self._num_samples = adapter._num_samples

    def __len__(self) -> int:
        return int(self._num_samples)

    def __getitem__(self, index: int) -> _Row:
        return _Row(index, self._leaves)

    def batch(self, rows: Sequence[_Row]) -> Any:
        """Return rows of all arrays."""
        indices = [row.index for row in rows]
        return tree_map(
            lambda each: None if each is None else torch.as_tensor(each.convert_to_torch_compatible(each[indices])),
            self._arrays,
        )


class _Batches(Dataset[Any]):
    """The batches of a PyDataset: each is a sample."""

    def __init__(self, adapter: PyDatasetAdapter) -> None:
        self._adapter = adapter
        self.py_dataset: PyDataset = adapter.py_dataset

    def __len__(self) -> int:
        return int(self.py_dataset.num_batches)

    def __getitem__(self, index: int) -> Any:
        return self._adapter._standardize_batch(self.py_dataset[index])


def _only(batches: Sequence[Any]) -> Any:
    (batch,) = batches
    return batch
