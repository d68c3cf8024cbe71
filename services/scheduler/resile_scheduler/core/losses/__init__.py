"""How jobs continue when workers end, are silent or come too late: `recovery.py` decides."""
