"""What all parts of Resile share: errors and, with the pool, messages and the bus."""
