"""IBM's ``emetrics``."""

from resile.integrations.ibm_edt.logs import EMetrics

__all__ = ["EMetrics"]
