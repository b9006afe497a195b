"""`cepheid init` while its metadata store comes and goes, as in the first minute of a cluster on a busy machine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cepheid_cli import init
from cepheid_metadata import MetadataError, SessionLostError, StoreUnavailableError


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("failures", "wait_s", "outcome"),
    [
        ([StoreUnavailableError("the connection was lost", outcome_unknown=True), SessionLostError("it expired")], 60.0, "founded"),
        ([StoreUnavailableError("the connection was lost")] * 9, 5.0, "the connection was lost"),
        ([MetadataError("damaged")], 60.0, "damaged"),  # waiting would not help
    ],
)
async def test_it_begins_again_until_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, failures: list[MetadataError], wait_s: float, outcome: str
) -> None:
    left = list(failures)

    async def found_once(*_: Any) -> str:
        if left:
            raise left.pop(0)
        return "founded"

    monkeypatch.setattr(init, "_found_once", found_once)
    began = asyncio.get_running_loop().time()
    try:
        said = await init._found("zk://x", "east", "", "", wait_s, None)
    except MetadataError as error:
        said = str(error)
    assert said == outcome
    assert asyncio.get_running_loop().time() - began <= wait_s
