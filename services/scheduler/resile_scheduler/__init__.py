"""Who gets which slots: jobs, their states, and the workers each shall have.

In: commands on jobs, host records, heartbeats, reports of workers. Stores a `JobRecord` and an `Allocation` for each
job; agents obey allocations, and events are published from the records' history. Start reading at `core/core.py`.
"""
