"""IBM's ``emetrics``."""

from resile.integrations.ibm_edt.emetrics import EMetrics

__all__ = ["EMetrics"]
