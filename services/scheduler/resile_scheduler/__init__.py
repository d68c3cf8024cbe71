"""Who gets which slots: jobs, their states, and the workers of each.

In: commands on jobs, host records, heartbeats, reports of workers. Stores a `JobRecord` and an `Allocation` for each
job; agents obey allocations, and events are published from the records' history. ``python -m resile_scheduler`` runs
it.

core/         the decisions; start reading at `core/core.py`
service.py    passes messages to the core as events
executor.py   executes its commands, in the order that keeps the promises
lease.py      which scheduler leads
settings.py   flags and environment
simulation/   the same core in virtual time, and workloads replayed under any scheduler
"""
