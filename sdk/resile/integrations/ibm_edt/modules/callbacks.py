"""IBM's ``callbacks``."""

from resile.integrations.ibm_edt.callbacks import Callback, LoggerCallback

__all__ = ["Callback", "LoggerCallback"]
