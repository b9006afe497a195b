"""The admin API of a broker: REST, metrics, lookup over HTTP, the plan service. README.md has the rules.

Cheap to import: the web framework is imported when the server starts.
"""

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.server import AdminServer

__all__ = ["AdminContext", "AdminServer"]
