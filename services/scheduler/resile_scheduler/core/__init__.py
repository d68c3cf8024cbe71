"""State and decisions of the scheduler: no clock, no chance, no input or output."""
