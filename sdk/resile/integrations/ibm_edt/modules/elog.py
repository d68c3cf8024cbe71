"""IBM's ``elog``."""

from resile.integrations.ibm_edt.elog import ELog

__all__ = ["ELog"]
