"""Imports that a script needs later, named so that its workers can be forked with them."""

import importlib


def preload(*modules: str) -> None:
    """Import modules now, by name, that the script or a library would otherwise import later.

    Workers of a job are forked from a process that has run the imports at the head of the script, before its first
    other statement; a call of this function there belongs to the head. Raises ImportError.
    """
    for name in modules:
        importlib.import_module(name)
