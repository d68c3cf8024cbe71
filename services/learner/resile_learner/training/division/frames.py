"""Where in a script the loader was asked for a batch: the frames of the loop, and what may be done with them."""

import dis
import re
import sys
import sysconfig
from collections.abc import Mapping
from ctypes import c_int, py_object, pythonapi
from inspect import CO_GENERATOR, CO_NEWLOCALS
from types import CodeType, FrameType, ModuleType
from typing import Any

_OWN = ("resile.", "resile_learner.")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ACCESS = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|NAME|GLOBAL|DEREF)|LOAD_CLOSURE")


def frames_of(caller: FrameType, outermost: int | None) -> list[FrameType]:
    """The frames of the script from ``caller`` to the one that asks for epochs, without those of libraries.

    Where that one is a generator which nothing asks at the moment, they end with the first that is no generator.
    """
    found: list[FrameType] = []
    frame: FrameType | None = caller
    while frame is not None:
        if not _is_in_library(frame.f_globals):
            found.append(frame)
        if id(frame) == outermost:
            break
        frame = frame.f_back
    if frame is None or any(each.f_code.co_flags & CO_GENERATOR for each in found[-1:]):
        end = next((number for number, each in enumerate(found) if not each.f_code.co_flags & CO_GENERATOR), len(found))
        return found[: end + 1]
    return found


def loop_frame(caller: FrameType) -> FrameType:
    """The frame of the script that ``caller`` works for, such as that of a loop over a bar of progress."""
    frame: FrameType | None = caller
    while frame is not None and (_is_in_library(frame.f_globals) or frame.f_code.co_flags & CO_GENERATOR):
        frame = frame.f_back
    return frame or caller


def is_library(module: ModuleType | None) -> bool:
    """Whether ``module`` is not the user's."""
    return module is not None and _is_in_library(vars(module))


def _is_in_library(variables: Mapping[str, Any]) -> bool:
    name, file = variables.get("__name__", ""), variables.get("__file__") or ""
    return name.startswith(_OWN) or file.startswith(_LIBRARIES) or (name in sys.builtin_module_names)


def _is_function(frame: FrameType) -> bool:
    """Whether the variables of ``frame`` are not those of its module."""
    return bool(frame.f_code.co_flags & CO_NEWLOCALS)


def scope_of(frame: FrameType) -> str:
    """The name of the function that ``frame`` runs, or of the module: alike on all workers."""
    return frame.f_code.co_qualname if _is_function(frame) else f"module {frame.f_globals.get('__name__')}"


def write_back(frame: FrameType) -> None:
    """Let assignments to the ``f_locals`` of a function reach its variables, as Python 3.13 does by itself."""
    if _is_function(frame) and sys.version_info < (3, 13):
        pythonapi.PyFrame_LocalsToFast(py_object(frame), c_int(0))


def assigned_first(frame: FrameType) -> set[str]:
    """The names that the body of the loop which ``frame`` is in assigns, in all cases, before it reads them."""
    instructions = list(dis.get_instructions(frame.f_code))
    loop = next((each for each in instructions if each.offset == frame.f_lasti and each.opname == "FOR_ITER"), None)
    if loop is None:
        return set()
    seen = _used_elsewhere(frame)
    assigned: set[str] = set()
    certain_from = 0
    for each in instructions:
        if not loop.offset < each.offset < loop.argval:
            continue
        if each.opcode in dis.hasjrel:
            goes_on = each.argval <= loop.offset  # `continue`: what follows may not be reached
            certain_from = max(certain_from, loop.argval if goes_on else each.argval)
        kinds = [match[0] for match in _ACCESS.finditer(each.opname)]
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        for kind, name in zip(kinds, names, strict=False):
            is_certain = each.offset >= certain_from and not _is_guarded(frame.f_code, each.offset, loop.offset)
            if name not in seen and kind.startswith("STORE") and is_certain:
                assigned.add(name)
            seen.add(name)
    return assigned


def _used_elsewhere(frame: FrameType) -> set[str]:
    """The variables of ``frame`` that its inner functions may read, or all functions of its module."""
    if _is_function(frame):
        return set(frame.f_code.co_cellvars)
    return set().union(*(_globals_of(code) for code in frame.f_code.co_consts if isinstance(code, CodeType)))


def _globals_of(code: CodeType) -> set[str]:
    inner = (_globals_of(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _is_guarded(code: CodeType, offset: int, loop: int) -> bool:
    """Whether an error at ``offset`` is handled within the loop, as in `try`, so that it may not be reached."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return any(loop < each.start <= offset < each.end for each in table)
