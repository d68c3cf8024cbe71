"""What the services say to each other: frozen pydantic models, one module per conversation.

message.py      the root of all models, and the types of ids and times
hosts.py        the hosts of a pool and their workers, as agents and the registry report them
jobs.py         what was submitted, a job's record, and the events made from its history
allocations.py  the workers that each job is assigned, and their slots
commands.py     requests, with their replies
instructions.py what the scheduler tells an agent beside the allocations
reports.py      what workers told their agents
logs.py         output of workers
pool.py         what all parts agree on, and which scheduler leads
usage.py        how many slots were held, and for how long
spans.py        the steps of changes; curves.py, slot_history.py what monitors keep
deadletters.py  messages that could not be read or handled
"""
