"""The command `resile`. Nothing is imported here that takes time: the commands import what they need."""

import errno
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence

INTERRUPTED = 130
BROKEN_PIPE = 141
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]*-[0-9a-f]{6}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (without the program's name); return its exit status.

    Without ``arguments`` it is the whole process: it reads the command line, and leaves no child behind but a browser.
    """
    try:
        return _main(list(arguments)) if arguments is not None else _process()
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if _is_caused_by_interrupt(error):  # in the middle of an import that makes another error of it
            return _interrupted()
        raise


def _interrupted() -> int:
    print("resile: interrupted", file=sys.stderr)
    return INTERRUPTED


def _is_caused_by_interrupt(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _process() -> int:
    arguments = sys.argv[1:]
    if sys.platform != "linux" or arguments[:1] == ["page"]:  # the browser that `resile page` opens outlives it
        return _main(arguments)
    from resile_learner.processes.descendants import OwnProcesses, adopt_orphans, kill_all

    adopt_orphans()
    own = OwnProcesses()
    try:
        return _main(arguments)
    finally:
        kill_all(own)  # what a fork server that was killed has left: this process has adopted it


def _main(arguments: list[str]) -> int:
    import typer

    from resile_shared.errors import ResileError

    from .app import command

    try:
        status = command.main(with_resume_value(arguments), prog_name="resile", standalone_mode=False)
    except ResileError as error:
        _report(str(error), arguments)
        return error.exit_status
    except typer.TyperException as error:
        command_line = getattr(getattr(error, "ctx", None), "command_path", "resile")
        _report(_explain(error.format_message().rstrip("."), command_line), arguments)
        return error.exit_code
    except typer.Abort:  # a KeyboardInterrupt
        return _interrupted()
    except BrokenPipeError:  # `resile events -f | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != "can't start new thread":
            raise
        _report(_explain_shortage(error), arguments)
        return 1
    return status if isinstance(status, int) else 0


def _report(error: str, arguments: Sequence[str]) -> None:
    """Print an error as one line, and with ``--json`` as an object too, unless its one object says what has started."""
    from resile_shared.text import printable

    from .lenient import LenientStream

    print(f"resile: {printable(error)}", file=sys.stderr)
    options = itertools.takewhile(lambda word: word != "--", arguments)
    if "--json" in options and arguments[0] not in ("up", "host"):
        state = {"state": "failed"} if arguments[0] == "run" else {}
        print(json.dumps({**state, "error": error}), file=LenientStream(sys.stdout), flush=True)


def _explain(fault: str, command: str) -> str:
    from resile_shared.validation import phrase

    option, found, message = fault.partition(": ")
    fault = option + found + phrase(message)
    if fault.startswith("No such option") and command in ("resile run", "resile submit"):
        return f"{fault}; put options of the script after `--`; `{command} --help` lists the others"
    return f"{fault}; see `{command} --help`"


def _explain_shortage(error: OSError | RuntimeError) -> str:
    """Say which limit is used up, if it is one."""
    if isinstance(error, RuntimeError) or error.errno == errno.EAGAIN:
        return (
            "no process or thread can be started: the limit of this user is used up: end other processes, or raise it "
            "(ulimit -u, TasksMax in systemd, the pids limit of a container)"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"no file can be opened: {error.strerror}: raise the limit of open files (ulimit -n)"
    return str(error)


def _is_no_script(words: Sequence[str]) -> bool:
    """Whether the first of ``words`` was meant as a value, since a script follows it."""
    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        return False
    return not os.path.exists(words[0]) and os.path.exists(words[1])


def with_resume_value(arguments: Sequence[str]) -> list[str]:
    """Give ``--resume`` an empty value unless the next argument is the id of a run. Raises UsageError."""
    from resile_shared.errors import UsageError

    changed: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*changed, word, *rest]
        if word == "--resume":
            run = rest.pop(0) if rest and _RUN_ID.fullmatch(rest[0]) else ""
            if not run and _is_no_script(rest):
                raise UsageError(
                    f"--resume {rest[0]}: {rest[0]!r} is not the id of a run, such as train-1a2b3c: omit it to resume "
                    "the script's newest run"
                )
            word = f"--resume={run}"
        changed.append(word)
    return changed
