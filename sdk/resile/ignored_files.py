"""`.resileignore`: which files of a folder are not sent with a job. Its patterns are those of a .gitignore."""

from pathlib import Path

from pathspec import GitIgnoreSpec

from resile_shared.errors import UsageError

FILE = ".resileignore"


class IgnoredFiles:
    """The files that the `.resileignore` of ``folder`` names, if there is one. Raises UsageError if it is invalid."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file = folder / FILE
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError as error:
                raise UsageError(f"{file}, line {number}: {line!r} is not a pattern of a .gitignore") from error
        self._spec = GitIgnoreSpec.from_lines(lines)

    def has(self, path: Path, *, is_folder: bool) -> bool:
        """Whether ``path``, in a folder that is not ignored, is ignored."""
        name = path.relative_to(self._folder).as_posix()
        return self._spec.match_file(f"{name}/" if is_folder else name)
