"""Trainers of other libraries, made elastic. Each module needs its library; nothing here imports one by itself.

``resile.integrations.transformers`` has ``ElasticTrainer``, which takes the place of ``transformers.Trainer``;
``resile.integrations.lightning`` has ``ElasticTrainer``, which takes the place of ``lightning.Trainer``;
``resile.integrations.keras`` has ``elastic``, which replaces the ``fit`` of a model;
``resile.integrations.ibm_edt`` runs scripts for IBM's Elastic Distributed Training as they are.
``resile.integrations.accelerate`` has an ``Accelerator``, which takes the place of ``accelerate.Accelerator``.
"""
