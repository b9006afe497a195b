"""Ports to the outside world (threads, clock, randomness), tasks with an owner, and the base class of all errors."""

from cepheid_ports.addresses import HOST_PATTERN, host_of, host_port
from cepheid_ports.errors import CepheidError
from cepheid_ports.first_failure import ProcessFailedError
from cepheid_ports.ports import Ports
from cepheid_ports.private_files import PRIVATE_UMASK, make_new_files_private, make_private
from cepheid_ports.process_heap import keep_large_buffers, own_pages, share_one_arena
from cepheid_ports.racks import ELSEWHERE, RACK_PATTERN, SAME_RACK, SAME_REGION, rack_distance, region_of
from cepheid_ports.refusal_log import RefusalLog, without_details
from cepheid_ports.role import Role
from cepheid_ports.single_flight import SingleFlight
from cepheid_ports.steady_clock import SteadyClock, iso_time
from cepheid_ports.tasks import TaskOwner
from cepheid_ports.worker import OnDone, ThreadWorker, Worker

__all__ = [
    "ELSEWHERE",
    "HOST_PATTERN",
    "PRIVATE_UMASK",
    "RACK_PATTERN",
    "SAME_RACK",
    "SAME_REGION",
    "CepheidError",
    "OnDone",
    "Ports",
    "ProcessFailedError",
    "RefusalLog",
    "Role",
    "SingleFlight",
    "SteadyClock",
    "TaskOwner",
    "ThreadWorker",
    "Worker",
    "host_of",
    "host_port",
    "iso_time",
    "keep_large_buffers",
    "make_new_files_private",
    "make_private",
    "own_pages",
    "rack_distance",
    "region_of",
    "share_one_arena",
    "without_details",
]
