"""Who gets which slots: jobs, their states, and the workers each shall have.

In: commands on jobs, host records, heartbeats, reports of workers. Stores a `JobRecord` and an `Allocation` for each
job; agents obey allocations, and events are published from the records' history. ``python -m resile_scheduler`` runs
it.

core/         the decisions; start reading at `core/core.py`
service.py    what arrives goes to the core
execution.py  what the core commands is carried out, in the order that keeps the promises
lease.py      which scheduler decides
settings.py   what it is told at its start
simulator.py  the same core in virtual time
"""
