"""Published workloads, replayed without the scheduler's core, under published schedulers and the policies of Resile.

replay.py            workloads of profiled applications under any scheduler; start reading here
baselines.py         published schedulers
policy_scheduler.py  a policy as such a scheduler; overlapped.py is its throughput model, packing.py its placement
fairness.py          finish-time fairness of a replay
"""
