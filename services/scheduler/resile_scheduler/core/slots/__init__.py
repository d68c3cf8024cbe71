"""Which slots each job should have, and the next step towards that: start reading at `decisions.py`."""
