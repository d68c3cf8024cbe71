"""The faults that pydantic finds, in readable words: "priority must be a valid integer"."""

import re

_PHRASES = (
    (re.compile(r"^Value error, "), ""),
    (re.compile(r"\b(?:Input|String|List|Tuple|Set|Dictionary|Number|Value|Data|Object|Bytes) should "), "must "),
    (re.compile(r"\ba valid dictionary or instance of \w+"), "an object"),
    (re.compile(r", unable to parse string as an? \w+( number)?"), ""),
    (re.compile(r", unable to interpret input"), ""),
    (re.compile(r", got a number with a fractional part"), ""),
    (re.compile(r"^Field required$"), "is missing"),
    (re.compile(r"^Extra inputs are not permitted$"), "is unknown"),
)


def phrase(message: str) -> str:
    """Return the message of one fault without pydantic's own phrases."""
    for pattern, plain in _PHRASES:
        message = pattern.sub(plain, message)
    return message


def describe_fault(where: str, message: str) -> str:
    """Return what is wrong with ``where``, which may be empty: the whole input."""
    text = phrase(message)
    if not where:
        return text
    return f"{where} {text}" if text.startswith(("must ", "is ")) else f"{where}: {text}"
