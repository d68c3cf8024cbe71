"""The agent of one host: it starts and stops the workers that allocations place there, and reports what they do.

core.py         the decisions; pure. events.py: its events and commands; templates.py, worker_records.py and
                report_filter.py: parts of it
service.py      runs one incarnation after the other; incarnation.py: one of them, the shell around the core
host_workers.py prepares and observes workers, which `processes/` runs; packages.py and job_files.py serve them
reporting.py    publishes reports in order, and keeps them on disk until then

In: the buckets allocations, jobs and hosts, `resile.instruction.<host>`. Out: `resile.host.<host>.hello`, `.goodbye`,
`resile.heartbeat.<host>`, `resile.report.<job>.<kind>`, `resile.log.<job>`. Stored: its own folder (folder.py), and
`jobs/<job>/output` in storage. Nothing here loads torch into the agent's own process.
"""
