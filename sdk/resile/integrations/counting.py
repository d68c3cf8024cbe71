"""Batches together with their numbers of samples."""

from typing import Any

from resile.training.extend import Collate


def counted(collate: Collate) -> Collate:
    """Collate and count the samples: the first dimension of a tensor is not always their number."""

    def collate_and_count(samples: list[Any]) -> tuple[int, Any]:
        return len(samples), collate(samples)

    return collate_and_count
