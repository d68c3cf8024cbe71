"""The full state of a run: what it is, and the one form in which it is handed over and stored.

run.py      RunState: progress, parameters, buffers, optimizer and the rest, gathered from and loaded into live objects
facts.py    what must be equal on all workers, compared in the first round and whenever a state is loaded
flat.py     FlatState: a state as a skeleton (JSON) and a list of tensors; `flatten`, `allocate`, `unflatten`
memory.py   the bytes of tensors, as views

A joiner allocates buffers from the skeleton, receives the tensors into them over the links of the gradient exchange
(``collectives/state_transfer.py``), and loads them. A checkpoint stores the bytes of the same skeleton and tensors, cut
into parts (``checkpoint/``).
"""
