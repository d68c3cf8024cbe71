"""Writes sdk/resile/sync_calls.py from sdk/resile/client.py: `python -m tests.sdk.sync_calls`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SDK = Path(__file__).resolve().parents[2] / "sdk" / "resile"
TARGET = SDK / "sync_calls.py"
OWN = {"submit_script"}
"""Methods that `sync_client.Client` has in another form."""
OWN_IMPORTS = (
    "from collections.abc import AsyncIterator, Coroutine, Iterator",
    "from typing import Any, TypeVar",
    "from .client import AsyncClient",
)
HEADER = '''"""The calls of `client.AsyncClient` without asyncio.

Written by `python -m tests.sdk.sync_calls`: do not edit it.
"""

{imports}

T = TypeVar("T")


class SyncCalls:
    """Each method waits for the method of ``_client`` with the same name."""

    _client: AsyncClient

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        raise NotImplementedError
'''


def written() -> str:
    """Return the module, formatted as all code is, with those of the client's imports that it uses."""
    tree = ast.parse((SDK / "client.py").read_text())
    (client,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AsyncClient")
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    text = HEADER.replace("{imports}", "\n".join([*imports, *OWN_IMPORTS]))
    text += "".join(f"\n{method}\n" for method in _methods(client))
    return _ruff("format", text=_ruff("check", "--fix-only", "--select", "F,I", text=text))


def _ruff(*arguments: str, text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _methods(client: ast.ClassDef) -> Iterator[str]:
    methods = (node for node in client.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return (_method(each) for each in methods if not each.name.startswith("_") and each.name not in OWN)


def _method(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = method.args
    given = [argument.arg for argument in arguments.args[1:]]
    given += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    returned = ast.unparse(method.returns) if method.returns else "None"
    call = f"self._client.{method.name}({', '.join(given)})"
    if isinstance(method, ast.AsyncFunctionDef):
        body = f"self._run({call})"
    else:
        returned, body = returned.removeprefix("Async"), f"self._iterate({call})"
    lines = (ast.get_docstring(method) or "").splitlines()
    docstring = "\n".join(f"        {line}" if line else "" for line in lines).lstrip()
    end = "\n        " if len(lines) > 1 else ""
    return (
        f"    def {method.name}({ast.unparse(arguments)}) -> {returned}:\n"
        f'        """{docstring}{end}"""\n'
        f"        {'' if returned == 'None' else 'return '}{body}"
    )


if __name__ == "__main__":
    TARGET.write_text(written())
