"""The agent of one host: it starts, orders, hears and ends the workers that allocations place there.

core.py       what is to be done; pure. events.py: its events and commands
service.py    one incarnation after the other; life.py: one of them, the shell around the core
processes.py  workers from their preparation to their end; packages, outputs, logs and reporting serve them

In: the buckets allocations, jobs and hosts, `resile.instruction.<host>`. Out: `resile.host.<host>.hello`, `.goodbye`,
`resile.heartbeat.<host>`, `resile.report.<job>.<kind>`, `resile.log.<job>`. Stored: its own folder (folder.py), and
`jobs/<job>/output` in storage. Nothing here loads torch into the agent's own process.
"""
