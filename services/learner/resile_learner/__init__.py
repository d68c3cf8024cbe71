"""The learner: the processes that train, and the agent that starts them.

agent/        the agent of a host in a pool: starts and stops the workers placed there (never loads torch)
processes/    worker processes: forked from a fork server, followed to their end (never loads torch)
devices.py    asks torch what a machine has, in a process of its own
worker/       one worker process: its control thread, and the session that the training loop uses
membership/   how a worker joins, switches generations, recovers and leaves: a pure state machine
collectives/  the gradient exchange: the fixed tree, frames, links and what moves over them
training/     what a script calls: ElasticModel, ElasticLoop, data order, ledger, digests
checkpoint/   when checkpoints are taken, and their parts and manifests in object storage
state/        the full state of a run, as it is handed over and stored; what must be equal on all workers
session.py    the interface between the training call and the run around it
phases.py     the phase that the main thread of a worker is in
"""
