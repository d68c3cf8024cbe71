"""The training of rescaled.py, in a script that imports scikit-learn as well: second_job.py starts it."""

from sklearn.datasets import load_digits  # noqa: I001 - before the import of a module of its own folder

import rescaled

if __name__ == "__main__":
    load_digits()
    rescaled.main()
