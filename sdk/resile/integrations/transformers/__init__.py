"""Hugging Face's Trainer, elastic.

::

    from resile.integrations.transformers import ElasticTrainer

    trainer = ElasticTrainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train()
"""

from ..requirements import require

require("transformers", minimum="5.23", below="6")
require("accelerate", minimum="1.15", below="2")

from .trainer import ElasticTrainer  # noqa: E402

__all__ = ["ElasticTrainer"]
