"""Failure injection on a running pool, and checks that its promises held: `resile chaos`.

`attacks.py` defines attacks; `injector.py` carries one out: `processes.py` finds its victims, and `lasting_attack.py`
undoes it in any case; `requests.py` makes those that a user could make. `observation.py` records what the pool reports,
and `recovery.py` finds in it when the pool had recovered. `plan.py` draws attacks from a seed, `targets.py` their
victims, `campaign.py` executes them, and `verdict.py` lists broken promises: by records and reports, by the members'
own account (`members.py`), by the agents' logs (`slots.py`) and by what is stored (`stored_model.py`).
"""
