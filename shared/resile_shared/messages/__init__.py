"""What the services say to each other: frozen pydantic models, one module per conversation.

message.py      the root of all models, and the types of ids and times
hosts.py        agents, registry: who is here, and what its workers are doing
jobs.py         what was submitted, a job's record, and the events made from its history
allocations.py  which workers a job shall have, and where
commands.py     requests with an answer
instructions.py what the scheduler tells an agent beside the allocations
reports.py      what workers told their agents
logs.py         output of workers
lease.py        which scheduler leads
deadletters.py  what could not be read
"""
