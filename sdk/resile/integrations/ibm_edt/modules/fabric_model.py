"""IBM's ``fabric_model``."""

from resile.integrations.ibm_edt.fabric_model import FabricModel

__all__ = ["FabricModel"]
