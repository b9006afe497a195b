"""A source whose rows describe the environment of its tasks: versions, and which bookies answer. Only for `doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from cepheid_scan.bookie_channels import ScanDoor

PROBES = 8
"""Number of tasks that check: on a larger cluster not every worker is reached."""
REACH_TIMEOUT_S = 3.0
_PACKAGES = ("cepheid", "pyarrow", "numpy", "grpcio")


class DoctorSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "cepheid_doctor"

    def schema(self) -> str:
        return "found string"

    def reader(self, schema: StructType) -> DataSourceReader:
        return DoctorReader(json.loads(self.options.get("bookies", "{}")))


class DoctorReader(DataSourceReader):
    def __init__(self, bookies: Mapping[str, str]) -> None:
        self._bookies = bookies

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(PROBES)]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        found = {
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "modules": {name: _version(name) for name in _PACKAGES},
            "unreachable": _unreachable(self._bookies),
            "by_grpc": _by_grpc(self._bookies),
        }
        yield (json.dumps(found),)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unreachable(bookies: Mapping[str, str]) -> dict[str, str]:
    errors: dict[str, str] = {}
    for bookie, place in bookies.items():
        host, _, port = place.rpartition(":")
        if (error := _connect_error(host.strip("[]"), int(port))) is not None:
            errors[f"{bookie} at {place}"] = error
    return errors


def _by_grpc(bookies: Mapping[str, str]) -> dict[str, str]:
    """Return why bookies that answer are read by gRPC, and not on their scan port."""
    import grpc

    from cepheid_rpc import MalformedGroupError
    from cepheid_scan.bookie_channels import learn_door, scan_port_call

    reasons: dict[str, str] = {}
    for bookie, place in bookies.items():
        try:
            door = learn_door(place, scan_port_call(place).result(timeout=REACH_TIMEOUT_S))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                reasons[bookie] = "it has no scan port: an older release"
        except grpc.FutureTimeoutError:
            pass  # reported with the unreachable ones
        except MalformedGroupError:
            reasons[bookie] = "it serves scans with another protocol than this release"
        else:
            if door is not None and (why := _scan_error(door)) is not None:
                reasons[bookie] = f"port {door.port}, for scans: {why} (open it, or set the bookie's --scan-port)"
    return reasons


def _scan_error(door: ScanDoor) -> str | None:
    from cepheid_scan.scan_connection import dial_on_machine, dial_port, is_served

    if is_served(dial_on_machine(door), door):
        return None
    if (why := _connect_error(door.host, door.port)) is not None:
        return why
    return None if is_served(dial_port(door), door) else "the answer is not from the bookie, or it refuses this process"


def _connect_error(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return None
