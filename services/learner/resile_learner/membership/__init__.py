"""When a worker joins, switches generations, recovers and leaves: a pure state machine, `machine.Membership`.

`events.py` has its events and commands, `roles.py` the roles of a worker and the transitions between them, `view.py`
what the main thread may know of it, `round_agreement.py` how the members of a recovery order synchronize their state.
"""
