"""IBM's Elastic Distributed Training API over `ElasticLoop`: its scripts run unmodified.

``resile run --compat ibm-edt elastic-main.py`` passes the name of this module to the worker, which calls
`activate` before it runs the script. The folder ``modules`` has the modules that such scripts import, under the names
that they use.
"""

from .environment import activate

__all__ = ["activate"]
