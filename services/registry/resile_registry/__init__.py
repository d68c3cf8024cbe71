"""The registry: host membership. Hosts join, drain, leave and are lost.

In: an agent's ``hello`` and ``goodbye``, heartbeats, the commands ``host.drain`` and ``host.undrain``. Out: ``joined``,
``draining``, ``left`` and ``lost``. Stores one `HostRecord` for each host. ``python -m resile_registry`` runs it.

core.py      the decisions
service.py   the asyncio shell: passes messages to the core, and carries out its commands in order for each host
settings.py  its settings
"""
