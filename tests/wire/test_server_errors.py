from __future__ import annotations

from cepheid_wire import ServerError
from cepheid_wire import pulsar_api_pb2 as pb


def test_the_codes_are_those_of_the_protocol() -> None:
    ours = {code.name.replace("_", "").lower(): int(code) for code in ServerError}
    assert ours == {value.name.lower(): value.number for value in pb.ServerError.DESCRIPTOR.values}


def test_a_code_goes_into_a_command() -> None:
    error = pb.CommandError(request_id=1, error=ServerError.CONSUMER_BUSY.as_protobuf, message="m")
    assert error.error == pb.ServerError.ConsumerBusy == ServerError.CONSUMER_BUSY
    assert pb.CommandError.FromString(error.SerializeToString()) == error
