"""IBM's ``elog``."""

from resile.integrations.ibm_edt.logs import ELog

__all__ = ["ELog"]
