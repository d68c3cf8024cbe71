"""How many workers each job should have: pure functions of (jobs, number of slots).

All policies keep the same promises: never more than there is; every job that gets anything gets its minimum, and never
more than its maximum or its number of shards. They differ in who is admitted when the minimums do not all fit, and in
how what is left is shared.

An iteration takes as long as the worker with most shards, ceil(V / N) of them. A slot that would leave this unchanged
is offered to the other jobs first. If no job gains by it, those policies that share by priority or order leave it where
it is, and those that look for the most speed leave it idle.

`demand.py` has what a policy sees and returns, `shares.py` the steps that policies have in common, `table.py` the
policies by name. A policy imports nothing of `core`, which calls it.
"""
