"""A model whose calls are divided among workers, where the body runs once for each batch: see docs/division.md."""
