"""Who is here: hosts that join, drain, leave and are lost.

In: an agent's ``hello`` and ``goodbye``, heartbeats, the command ``host.drain``. Out: ``joined``, ``draining``,
``left`` and ``lost``. Stores one `HostRecord` for each host. Start reading at `core.py`.
"""
