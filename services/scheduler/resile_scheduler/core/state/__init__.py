"""What is known of hosts, jobs and workers, and which worker holds which slot: `pool.py` has it all."""
