"""Sums one bucket on a device: parts of pieces to the ranks that fold them, the fold, and the sums back to all.

The library moves bytes and never adds any. The additions are the same as on a CPU, one rounding each, in the order of
the tree, so the bits are the same too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .bucket_plan import BucketPlan
from .process_group import DeviceGroup


class Rows:
    """Memory for the pieces that a rank adds up, kept from bucket to bucket. For one stream alone."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, plan: BucketPlan, like: Tensor) -> Tensor:
        """Rows for ``plan``, of the dtype and on the device of ``like``."""
        num_bytes = plan.num_rows * plan.num_columns * like.element_size()
        if self._memory.device != like.device or self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old one first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return self._memory[:num_bytes].view(like.dtype).view(plan.num_rows, plan.num_columns)


def sum_bucket(
    plan: BucketPlan,
    partials: Sequence[Tensor],
    sums: Tensor,
    group: DeviceGroup,
    rows: Rows,
    *,
    is_maximum: bool = False,
) -> None:
    """Write the sum of all pieces to ``sums``, which may be ``partials[0]``. On the current stream of the device.

    With ``is_maximum`` the greatest values are written. Raises RuntimeError when the process group fails.
    """
    memory = rows.reserve(plan, sums)
    for part in plan.kept:
        memory[part.row, part.column : part.column + part.span.length] = partials[part.piece][slice(*part.span)]
    group.send_receive(
        [(part.peer, partials[part.piece][slice(*part.span)]) for part in plan.sends],
        [(part.peer, memory[part.row, part.column : part.column + part.span.length]) for part in plan.receives],
    )
    fold_rows(plan, memory, torch.maximum if is_maximum else torch.add)
    sums[slice(*plan.own)] = memory[0, : plan.own.length]
    sums[slice(*plan.tail)] = memory[0, plan.own.length :]
    if plan.gathered.length:
        group.gather(sums[slice(*plan.gathered)], sums[slice(*plan.own)])


def fold_rows(plan: BucketPlan, rows: Tensor, add: Callable[..., object] = torch.add) -> None:
    """Add up the rows in the order of the tree, into row 0."""
    for left, right in plan.folds:
        add(rows[left], rows[right], out=rows[left])
