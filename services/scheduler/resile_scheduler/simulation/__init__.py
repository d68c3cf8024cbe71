"""The scheduler in virtual time: the real core, with simulated hosts and jobs.

pool.py      the simulated pool: the core, its events and commands; start reading here
timeline.py  virtual time
agents.py    which workers run on which host, and the heartbeats that say so
workers.py   what workers do: start, join, train, leave
job.py       how far the workers of a simulated job have come
training.py  what jobs train, and how fast
workload.py  what is submitted, and when
"""
