"""The faults that pydantic finds, in readable words: "priority must be a valid integer"."""

import re

from pydantic import BaseModel, ValidationError

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


def describe(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return all faults in one line. With ``model``, a number out of bounds is described by its whole range."""
    return "; ".join(faults(error, model))


def faults(error: ValidationError, model: type[BaseModel] | None = None) -> list[str]:
    """Return each fault, as "priority must be a valid integer", in one line."""
    found = []
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(part) for part in fault["loc"])
        expected = _range_of(model, fault["loc"]) if model else ""
        found.append(f"{where} {expected}" if expected else describe_fault(where, fault["msg"]))
    return [fault.replace("\n", " ") for fault in found]


def _range_of(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Return "must be an integer from 1 to 10" for a bounded integer field of ``model``, else nothing."""
    field = model.model_fields.get(str(location[0])) if len(location) == 1 else None
    if field is None or field.annotation is not int:
        return ""
    bounds = {name: getattr(item, name) for item in field.metadata for name in ("ge", "le") if hasattr(item, name)}
    return f"must be an integer from {bounds['ge']} to {bounds['le']}" if len(bounds) == 2 else ""
