"""Reads what a service serves at ``/metrics``."""

from prometheus_client.parser import text_string_to_metric_families


def samples(text: bytes) -> dict[str, float]:
    """Return the values in Prometheus' text format, by names as in ``resile_jobs{state="running"}``."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
