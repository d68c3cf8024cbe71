"""The scheduler in virtual time: the real core, with simulated hosts and jobs.

What `resile simulate` does:

simulate.py    a workload under one policy, from its first event to its last; start reading here
simulated_pool.py  the simulated pool: the core, its events and commands
timeline.py    virtual time
agents.py      which workers run on which host, and the heartbeats that say so
workers.py     what workers do: start, join, train, leave
job.py         how far the workers of a simulated job have come
training.py    what jobs train, and how fast: by profiles.py, throughputs.py, or as recorded
workload.py    what happens from outside: submissions, requests of users, hosts
sources.py     where workloads come from: a made-up load, tables.py with csv_table.py and arrivals.py, history.py
outcome.py     what became of the jobs
figures.py     the figures by which simulations are compared
"""
