"""What a script calls, and what makes the call elastic.

model.py      ElasticModel, the training call
loop.py       ElasticLoop, the hand-written loop: start reading here
prepare.py    prepare, for an ordinary loop: backward.py and gates.py are what its lines then do
settings.py   the settings of a training call, and the facts that must be equal on all workers
iteration.py  one iteration: its shards and the exchange
data/         the order of samples (batches.py, samplers.py), how a DataLoader and a stream are read, the ledger
slots.py      this worker's part of the summation tree, in buckets: of gradients.py and buffers.py
gradients.py  gradients, folded during the backward pass
buffers.py    BatchNorm statistics and other buffers, under the same tree; buffer_rules.py is how each combines
rounds.py     rounds: one exchange among all members; header.py is what each of them sends
validation.py validation at the end of each epoch
reports.py    what is reported to the agent, and the result; stragglers.py finds slow members
watch/        refuses what a script does that would train wrongly
determinism.py, seeds.py, digest.py  the same bits on every worker

Beside it: ``state/`` (the full state), ``checkpoint/`` (storing it), ``session.py`` (the run around the training call).
"""
