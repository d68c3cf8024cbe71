"""Worker processes: forked from a fork server, followed to their end. Used by the agent and by `resile run`.

fork_server.py     a process that has imported torch: forks, kills and reaps workers, and ends with its parent
template.py        a process that has imported what a job's workers import: forks workers for the fork server,
                   which asks it by template_forks.py; script_head.py finds the imports of a script
forked.py          the way from a fork to the worker's entry function
runner.py          runs workers to their end: prepares, forks and follows each, and reports its exit
client.py          starts a fork server and talks to it (fork_protocol.py)
worker_process.py  one worker: its messages, its output and its log (worker_log.py), how it ended (exits.py)
descendants.py     finds and kills every process below this one
reaper.py          runs a command, as builds of environments do, and ends all that it has started
scratch.py         the folder for temporary files

Nothing here loads torch, the bus or tracing: only the fork server imports torch, by name, once it runs.
"""
