"""State and decisions of the scheduler: no clock, no randomness, no input or output."""
