"""A training call within a loop of the script: the first one trains, and the next one is refused."""

import ast
import linecache
import os
import sys
from collections.abc import Iterator
from functools import lru_cache

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def enclosing_loop() -> str:
    """Return where the script has a loop in whose body this is called, such as ``train.py:12``; empty if nowhere."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        names = [str(frame.f_globals.get(name)) for name in ("__name__", "__package__")]
        if not any(_is_library(name, code.co_filename) for name in names):
            is_comprehension = code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>")
            if line := frame.f_lineno if is_comprehension else _loop_around(code.co_filename, frame.f_lineno):
                return f"{os.path.basename(code.co_filename)}:{line}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def notes_of_call() -> list[str]:
    """Return what the user should know of where the training call is."""
    place = enclosing_loop()
    return [REPEATED.format(place=place)] if place else []


def _is_library(module: str, file: str) -> bool:
    """Whether a module is none of the script's; one that is run as a program has its package's name alone."""
    top = module.partition(".")[0]
    return top.startswith("resile") or top in sys.stdlib_module_names or f"{os.sep}site-packages{os.sep}" in file


@lru_cache(maxsize=64)
def _loop_around(file: str, line: int) -> int:
    """The line of the innermost loop whose body has ``line``, in the same function; 0 if there is none."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return 0
    return max(_loops(tree, line, within=0), default=0)


def _loops(node: ast.AST, line: int, *, within: int) -> Iterator[int]:
    """Yield the line of the loop around each statement at ``line`` that has one."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            begin, end = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
            if begin is None or end is None or not begin <= line <= end:
                continue
            loop = node.lineno if isinstance(node, _LOOPS) and name == "body" else within
            if isinstance(child, ast.stmt) and loop and not isinstance(child, _SCOPES):
                yield loop
            yield from _loops(child, line, within=0 if isinstance(child, _SCOPES) else loop)


REPEATED = (
    "the training call is in the body of a loop, and only the first one of a process trains ({place}): the next one is "
    "refused. Run the script once for each training, as with an argument that says which one"
)
