"""Lightning's Trainer, elastic.

::

    from resile.integrations.lightning import ElasticTrainer

    trainer = ElasticTrainer(max_epochs=3)
    trainer.fit(module, datamodule=data)
"""

from ..requirements import require

require("lightning", minimum="2.6", below="2.7")

from .trainer import ElasticTrainer  # noqa: E402

__all__ = ["ElasticTrainer"]
