"""Whether a plain ``python train.py`` may depend on the order of sets of text, which is another one in each process.

The workers of a run hash alike (PYTHONHASHSEED is 0 for them). That of a plain process is chosen when it starts.
"""

import ast
import os
import sys
from pathlib import Path

SETS = "the order of sets (set PYTHONHASHSEED=0, as workers have it)"
_MAKES_SETS = frozenset({"set", "frozenset"})
_IGNORES_ORDER = frozenset({"len", "sorted", "min", "max", "any", "all"})


def unfixed_order() -> tuple[str, ...]:
    """Name the order of sets if it is unfixed here and the script, or a module in its folder, may depend on it."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if not sys.flags.hash_randomization or script is None:
        return ()
    folder = os.path.join(os.path.dirname(os.path.abspath(script)), "")
    files = {os.path.abspath(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    own = [file for file in files if file.startswith(folder) and "site-packages" not in file and file.endswith(".py")]
    return (SETS,) if any(_may_depend(Path(file)) for file in {os.path.abspath(script), *own}) else ()


def _may_depend(file: Path) -> bool:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    sets = {id(node) for node in ast.walk(tree) if _is_set(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=args) if name in _IGNORES_ORDER | _MAKES_SETS:
                sets -= set(map(id, args))
            case ast.Compare(comparators=others, ops=ops) if all(isinstance(op, ast.In | ast.NotIn) for op in ops):
                sets -= set(map(id, others))
    return bool(sets)


def _is_set(node: ast.AST) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _MAKES_SETS or name == "hash"
        case _:
            return False
