"""Attacks on a running pool, and whether its promises held: `resile chaos`.

`attacks.py` says what an attack is; `assault.py` carries one out, with `processes.py` to find its victims and
`holding.py` to undo it whatever happens; `observation.py` keeps what the pool tells, and `recovery.py` finds in it when
the pool had recovered. `plan.py` draws attacks from a seed, `campaign.py` carries out that plan, and `verdict.py` says
which promise broke.
"""
