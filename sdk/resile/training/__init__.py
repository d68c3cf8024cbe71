"""The training API: what a script imports.

A training call is all that a script needs::

    from resile.training import ElasticModel

    ElasticModel(model, datasets, loss_fn, optimizer).train(epochs=3, batch_size=192)

`prepare` makes an ordinary loop elastic, and `ElasticLoop` is the loop written by hand.
"""

import os

# PyTorch reads it once, at the first matrix product on a GPU, which may come before the training call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from resile_learner.datasets.paths import dataset
from resile_learner.training.buffer_rules import buffers
from resile_learner.training.division.division import undivided
from resile_learner.training.elastic_loader import ElasticLoader
from resile_learner.training.iteration import Iteration
from resile_learner.training.loop import ElasticLoop
from resile_learner.training.loss_weights import weigh
from resile_learner.training.model import Callback, ElasticModel
from resile_learner.training.preload import preload
from resile_learner.training.prepare import prepare
from resile_learner.training.reports import Result
from resile_learner.training.script_state import State
from resile_learner.training.seeds import seed
from resile_learner.training.selection import Best, Selection
from resile_learner.training.validation import Validation

__all__ = [
    "Best",
    "Callback",
    "ElasticLoader",
    "ElasticLoop",
    "ElasticModel",
    "Iteration",
    "Result",
    "Selection",
    "State",
    "Validation",
    "buffers",
    "dataset",
    "preload",
    "prepare",
    "seed",
    "undivided",
    "weigh",
]
