"""The scheduler in virtual time: the real core, with simulated hosts and jobs.

pool.py      the simulated pool: events, commands, time; start reading here
job.py       how far the workers of a simulated job have come
workload.py  what is submitted, and when
"""
