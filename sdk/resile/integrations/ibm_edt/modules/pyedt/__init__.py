"""IBM's package ``pyedt``."""
