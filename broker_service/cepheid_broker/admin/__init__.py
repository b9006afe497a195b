"""The admin API of a broker: REST, metrics, lookup over HTTP, the plan service. README.md has the rules.

It imports little: the web framework is imported when the server starts.
"""

from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.server import NO_SHARED_PORTS, AdminServer, SharedAdminPorts, open_admin_port

__all__ = ["NO_SHARED_PORTS", "AdminContext", "AdminServer", "SharedAdminPorts", "open_admin_port"]
