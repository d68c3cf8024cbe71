"""JSON documents: those that a schema allows, and others that are nearly so."""

import copy
from typing import Any

import hypothesis.strategies as st

IDS = {
    "job": ("job-1", "job-2", "job-3"),
    "job_id": ("job-1", "job-2", "job-3"),
    "host": ("host-1", "host-2"),
    "host_id": ("host-1", "host-2"),
}
"""Few, so that messages concern the same things."""
SMALL = st.integers(0, 5)
_LINES = ("name", "group")
_LINE = st.text("abc= ,-\u00fc", max_size=10)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([2**63, 2**64, -1, 1e308, "", "\x00", "\u202e", "9" * 400, "NaN"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def allowed(
    schema: dict[str, Any], definitions: dict[str, Any] | None = None, name: str = ""
) -> st.SearchStrategy[Any]:
    """Return documents that a JSON schema allows, mostly."""
    definitions = definitions if definitions is not None else schema.get("$defs", {})
    if reference := schema.get("$ref"):
        target = definitions[reference.rpartition("/")[2]]
        return st.deferred(lambda: allowed(target, definitions, name))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of([allowed(one, definitions, name) for one in schema[several]])
    return _by_type(schema, definitions, name)


def _by_type(schema: dict[str, Any], definitions: dict[str, Any], name: str) -> st.SearchStrategy[Any]:
    match schema.get("type"):
        case "object":
            return _object(schema, definitions)
        case "array":
            items = allowed(schema.get("items", {}), definitions, name)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=4)
        case "string":
            return _text(schema, name)
        case "integer":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -6) + 1)
            high = schema.get("maximum", schema.get("exclusiveMaximum", 2**53) - 1)
            return SMALL.map(lambda number: max(number, low)) | st.integers(low, high)
        case "number":
            low, high = schema.get("minimum", -1e300), schema.get("maximum", 1e300)
            return st.floats(low, high) | SMALL.map(lambda number: max(number, low))
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return ANYTHING


def _object(schema: dict[str, Any], definitions: dict[str, Any]) -> st.SearchStrategy[Any]:
    fields = {name: allowed(field, definitions, name) for name, field in schema.get("properties", {}).items()}
    if not fields:
        values = allowed(schema.get("additionalProperties") or {}, definitions)
        return st.dictionaries(_LINE, values, max_size=3)
    always = {name for name, field in schema["properties"].items() if "const" in field}
    required = {name: fields.pop(name) for name in {*schema.get("required", []), *always} if name in fields}
    return st.fixed_dictionaries(required, optional=fields)


def _text(schema: dict[str, Any], name: str) -> st.SearchStrategy[str]:
    if name in IDS:
        return st.sampled_from(IDS[name])
    if schema.get("format") == "date-time":
        return st.datetimes().map(lambda time: f"{time.isoformat()}Z")
    if pattern := schema.get("pattern"):
        return st.from_regex(pattern, fullmatch=True)
    shortest = schema.get("minLength", 0)
    return (
        _LINE.filter(lambda text: len(text) >= shortest) if name in _LINES else st.text(min_size=shortest, max_size=20)
    )


@st.composite
def nearly(draw: st.DrawFn, schema: dict[str, Any]) -> Any:
    """Draw a document that a schema allows, or one with a few changes."""
    document = copy.deepcopy(draw(allowed(schema)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2]))):
        document = _changed(draw, document)
    return document


def _changed(draw: st.DrawFn, document: Any) -> Any:
    if isinstance(document, dict) and document and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(document)))
        match draw(st.sampled_from(["drop", "add", "inside"])):
            case "drop":
                del document[name]
            case "add":
                document[draw(st.text(max_size=8))] = draw(ANYTHING)
            case _:
                document[name] = _changed(draw, document[name])
        return document
    if isinstance(document, list) and document and draw(st.booleans()):
        place = draw(st.integers(0, len(document) - 1))
        document[place] = _changed(draw, document[place])
        return document
    return draw(ANYTHING)
