"""Who is here: hosts that join, drain, leave and are lost.

In: an agent's ``hello`` and ``goodbye``, heartbeats, the command ``host.drain``. Out: ``joined``, ``draining``,
``left`` and ``lost``. Stores one `HostRecord` for each host. ``python -m resile_registry`` runs it.

core.py      the decisions
service.py   what arrives goes to the core, and what it commands is carried out, host by host
settings.py  what it is told at its start
"""
