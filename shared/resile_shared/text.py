"""Text from others, safe to show: terminals obey control characters, and bidirectional ones change what is read."""

import re

_CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 without the tab, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional
    "\u2028\u2029\ud800-\udfff\ufeff\ufff9-\ufffb]"  # separators of lines, surrogates, invisible marks
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def is_line(text: str) -> bool:
    """Whether ``text`` is one line that any terminal shows as it is."""
    return "\t" not in text and not _CONTROL.search(text)


def printable(text: str) -> str:
    """Return ``text`` as one line without colours, and with other control characters spelled out."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], _COLOUR.sub("", text))
