"""A pool on this machine: its home, and the processes it consists of."""
