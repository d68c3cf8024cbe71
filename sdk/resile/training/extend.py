"""What an adapter for another trainer needs beside `resile.training`. The adapters of `resile.integrations` use it.

An adapter drives an `ElasticLoop` as a script does, and lets the other trainer's own code compute the shards. The
smallest one gives a training step that somebody else wrote, which calls ``backward()`` itself, to each shard::

    def train(step, model, optimizer, dataset, **settings):
        loop = ElasticLoop(model, optimizer, dataset, **settings)
        for iteration in loop.iterations():  # not left before its end
            for batch in iteration.shards() if iteration.num_held else iteration.spare_shard():

                def handle(loss, run):
                    iteration.compute(loss, run, {"loss": loss.detach()}, allows_nan=False)

                with handled_backward(handle):
                    step(batch)
            if iteration.exchange():
                optimizer.step()
        return loop.result

- `handled_backward` hands each ``backward()`` of the code in its context to the adapter, with the loss and the function
  that runs the backward pass.
- `read_loader` reads what a DataLoader does; `planned` cuts its epochs into batches, and `default_num_shards` is into
  how many shards a batch is cut if nobody says.
- `check_is_mean` refuses a loss that is a sum; `LossIsASum` is the error.
- `current_session` is this worker's part in the run, a `SoloSession` if the script runs plainly. Its ``report`` takes
  a `Warned` for the job's history, its ``phases`` say what a worker spends its time with.
- A model that is given to `resile.training.prepare` may name, as ``holds``, objects that it takes care of: they do not
  travel where variables of the script refer to them.
- `seeded` restores the random generators after its block; `extra_states` and `load_extra_states` are the extra state of
  a model's modules.
"""

from resile_learner.messages import Warned
from resile_learner.session import SoloSession, current_session
from resile_learner.state.run import extra_states, load_extra_states
from resile_learner.training.backward import Backward, handled_backward
from resile_learner.training.data.batches import BatchPlan, default_num_shards
from resile_learner.training.data.data_loader import LoaderSettings, read_loader
from resile_learner.training.data.fetch import Collate, checked_dataset
from resile_learner.training.data.samplers import planned
from resile_learner.training.seeds import seeded
from resile_learner.training.watch.losses import LossIsASum, check_is_mean

__all__ = [
    "Backward",
    "BatchPlan",
    "Collate",
    "LoaderSettings",
    "LossIsASum",
    "SoloSession",
    "Warned",
    "check_is_mean",
    "checked_dataset",
    "current_session",
    "default_num_shards",
    "extra_states",
    "handled_backward",
    "load_extra_states",
    "planned",
    "read_loader",
    "seeded",
]
