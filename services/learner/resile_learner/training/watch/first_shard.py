"""What a worker reads and computes of the first shard of a batch, for headers to carry and workers to compare."""

from typing import Any

from torch import Tensor

from .repeatability import ShardFingerprint, check_computed_again, fingerprint


class FirstShard:
    """The fingerprint of the first shard. A worker by itself, ``is_alone``, computes it twice, and has another one."""

    def __init__(self, *, is_alone: bool) -> None:
        self.fingerprint: ShardFingerprint | None = None
        """None: it is not compared, or not computed yet."""
        self._again: ShardFingerprint | None = None
        self._is_alone = is_alone
        self._batch: Any = None

    def on_batch(self, batch: Any) -> None:
        """It was read, and is going to be computed."""
        self._batch = batch

    def on_loss(self, loss: Tensor | float, *, is_spare: bool) -> None:
        """Its ``loss`` was computed. ``is_spare``: it does not count here."""
        found = fingerprint(self._batch, loss)
        self._batch = None
        if is_spare and self._is_alone:
            self._again = found
        else:
            self.fingerprint = found

    def on_spare_gradients(self, digest: str) -> None:
        """The gradients were computed where it does not count."""
        if self._is_alone:
            self._again = self._again and self._again._replace(gradients=digest)
        else:
            self.fingerprint = self.fingerprint and self.fingerprint._replace(gradients=digest)

    def on_own_gradients(self, digest: str, *, has_same_bits: bool) -> None:
        """The gradients were computed where it counts. Raises NotRepeatable if it was computed twice, and differs."""
        assert self.fingerprint is not None
        self.fingerprint = self.fingerprint._replace(gradients=digest)
        if self._again:
            check_computed_again(self.fingerprint, self._again, has_same_bits=has_same_bits)
