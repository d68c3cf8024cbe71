"""`resile run`: one job on a pool of one host, all of it in this process but the workers.

run.py       starts the pool and the worker processes, and carries out what the pool decides
in_memory.py a scheduler and agents joined by a queue instead of the bus; pure
narrator.py  what the user is shown of the records and reports, and of what workers print
runs.py      the folders that runs are kept in, and what of a run outlives its process
plan.py      --plan as text; settings.py: what a run is asked to do, and its job; result.py: how it ended

Nothing here decides who trains: that is the scheduler's core, with `PlanPolicy` (`resile_scheduler/policies/plan.py`).
Nothing here loads torch.
"""
