"""What every part of Resile speaks: errors and, with the pool, messages and the bus."""
