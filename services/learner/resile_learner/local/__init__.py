"""`resile run`: one job on this machine, without a pool. A plan takes the scheduler's place."""
