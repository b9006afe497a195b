"""Object stores of a broker: nothing of them is loaded before it is needed, and a broker without them says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cepheid_broker import broker_segments as module
from cepheid_broker.broker_segments import broker_segments
from cepheid_broker.settings import TieredSettings
from cepheid_metadata import MemoryStore, MemoryTree
from cepheid_ports import Ports
from cepheid_tiered import requirements


def test_a_broker_starts_without_the_libraries_of_object_stores() -> None:
    code = """
import sys
import cepheid_broker.serving, cepheid_broker.standalone, cepheid_broker.admin.app
loaded = {"pyarrow", "obstore", "numpy", "cepheid_decode", "cepheid_tiered.segments"} & sys.modules.keys()
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_a_broker_has_no_object_stores_where_a_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(MemoryTree())
    assert broker_segments(store, TieredSettings(), "c", Ports()) is not None
    monkeypatch.setattr(requirements, "_LIBRARIES", ("obstore", "no_such_library"))
    said = requirements.missing_requirements()
    assert said is not None
    assert said.startswith("no_such_library is not installed; run pip install 'cepheid[tiered]'")
    assert module.broker_segments(store, TieredSettings(), "c", Ports()) is None
    await store.aclose()
