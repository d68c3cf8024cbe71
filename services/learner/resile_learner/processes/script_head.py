"""The imports at the head of a script: what it imports before it does anything else."""

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..code_copy import read_code
from ..messages import CodeCopy

MAX_BYTES = 1 << 20
Import = tuple[str, tuple[str, ...]]
"""A module, and the names that are imported from it."""


def head_imports(script: Path, code: CodeCopy | None = None) -> Iterator[Callable[[], None]]:
    """Yield functions that carry out the imports at the beginning of ``script``, one by one and in order.

    They end at the first statement of another kind, and at an import of a module in the script's folder: that is the
    user's code, which may do anything. A script that cannot be read or parsed imports nothing. It is read from
    its copy in ``code``, if there is one.
    """
    try:
        body = ast.parse(read_code(str(script), code)[:MAX_BYTES]).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for statement in body:
        imports = _imports_of(statement)
        if imports is None:
            return
        for module, attributes in imports:
            if _is_local(module, script.parent):
                return
            yield partial(_import, module, attributes)


def _imports_of(statement: ast.stmt) -> list[Import] | None:
    """Return the imports that a statement consists of; None for a statement of another kind."""
    match statement:
        case ast.Expr(value=ast.Constant()):
            return []
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return []
        case ast.Import(names=names):
            return [(name.name, ()) for name in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            return [(module, tuple(name.name for name in names if name.name != "*"))]
        case ast.Expr(value=ast.Call(func=function, args=args, keywords=[])) if _is_preload(function):
            modules = [each.value for each in args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            return [(module, ()) for module in modules] if len(modules) == len(args) else None
        case _:
            return None


def _is_preload(function: ast.expr) -> bool:
    """Whether this is `resile.training.preload`, under any of its usual names."""
    return ast.unparse(function) in ("preload", "training.preload", "resile.training.preload")


def _is_local(module: str, folder: Path) -> bool:
    """Whether ``module`` is found in the script's folder, which comes first on the path of a script."""
    name = module.partition(".")[0]
    return name not in sys.builtin_module_names and any(
        path.name == name or path.name.startswith(f"{name}.") for path in folder.glob(f"{name}*")
    )


def _import(module: str, attributes: tuple[str, ...]) -> None:
    """Import as ``from module import attributes`` does."""
    found = importlib.import_module(module)
    for name in attributes:
        if not hasattr(found, name) and hasattr(found, "__path__"):
            importlib.import_module(f"{module}.{name}")
