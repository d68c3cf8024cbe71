"""Object storage, and what is kept there: packages of code, models, datasets."""
