"""What to do about errors of a script that ordinary code has in an elastic loop."""

import traceback


def hint_for(error: BaseException) -> str:
    """A remedy for ``error``, or an empty string."""
    if not isinstance(error, AttributeError | TypeError) or "None" not in str(error):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or ".grad" not in (frames[-1].line or ""):
        return ""
    return (
        "a prepared loop has gradients once an iteration, after the backward pass of its last batch: write "
        "`if loader.sync_gradients:` before the lines that use them"
    )
