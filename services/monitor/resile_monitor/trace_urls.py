"""Where a collector shows a trace."""


def url_of(trace: str | None, template: str) -> str | None:
    """Return the URL of ``trace`` by ``template``, which has ``{trace}`` for its id; None: there is none."""
    return template.replace("{trace}", trace) if trace and template else None
