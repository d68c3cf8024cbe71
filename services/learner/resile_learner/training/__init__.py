"""What a script calls, and what makes the call elastic.

model.py     ElasticModel, the training call          loop.py       ElasticLoop, the hand-written loop
iteration.py one iteration: shards and the exchange   rounds.py     rounds and their headers (header.py)
batches.py   sample order, batches, shards            fetch.py      reading shards
gradients.py buckets and the local part of the tree   buffers.py    BatchNorm statistics and the like
runstate.py  the full state (state.py: as data)       ledger.py     every sample once
session.py   the seam to the worker around it         determinism.py, seeds.py, digest.py: the same bits
"""
