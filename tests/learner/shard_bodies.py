"""`prepare` for loops whose body runs once for each shard."""

from functools import partial

from resile import training

prepare = partial(training.prepare, body="shard")
