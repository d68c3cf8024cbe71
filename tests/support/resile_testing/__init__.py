"""Real parts for tests and benches, which a checkout can import and no wheel contains.

fixtures.py      a pool's bus with its accounts, an S3 server: ``pytest_plugins = ["resile_testing.fixtures"]``
services.py      a service in the test's own process
fake_agent.py    an agent whose workers are records
crash_points.py  a service that crashes at each point of its work; crashable.py is its process
collector.py     a collector of traces
histories.py     what must hold for the history of a job
waiting.py       waiting for what other processes do
samples.py       what a service serves at /metrics
"""
