"""Failure injection on a running pool, and checks that its promises held: `resile chaos`.

`attacks.py` defines attacks; `injector.py` carries one out: `processes.py` finds its victims, and `lasting_attack.py`
undoes it in any case; `requests.py` makes those that a user could make. `observation.py` records what the pool reports,
and `recovery_watch.py` finds in it when the pool had recovered. `attack_plan.py` draws attacks and their victims from a
seed, `campaign.py` executes them, and `verdict.py` lists broken promises: by records and reports, by the members' own
account (`members.py`), by the agents' logs and by what is stored.
"""
