"""`cepheid standalone`: the cluster of one process in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepheid_cli.log_lines import start_logging
from cepheid_cli.settings_loader import load_settings
from cepheid_ports import Ports

if TYPE_CHECKING:
    from cepheid_broker.standalone import StandaloneSettings

SWITCH_INTERVAL_S = 0.0005  # journal and reader threads need the interpreter for microseconds, but at once (default: 5 ms)


def run_standalone(flags: Mapping[str, Any], config: Path | None) -> None:
    """Serves until a signal; returns after a clean stop. Raises CepheidError when it cannot start or has to give up."""
    started = time.monotonic()
    from cepheid_broker.standalone import StandaloneSettings

    settings = load_settings(StandaloneSettings, flags=flags, environment_prefix="CEPHEID_STANDALONE_", file=config)
    start_logging()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings, started))


async def _serve(settings: StandaloneSettings, started: float) -> None:
    from cepheid_broker.standalone import Standalone

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    standalone = Standalone(settings, Ports())
    await standalone.start()
    try:
        _say(f"cepheid standalone, ready after {time.monotonic() - started:.2f} s")
        _say(f"  clients   {standalone.service_url}")
        _say(f"  admin     {standalone.admin_url}")
        _say(f"  data      {settings.data_dir.resolve()} ({settings.bookies} {'bookie' if settings.bookies == 1 else 'bookies'})")
        _say("  stop with Ctrl-C")
        _tame_garbage_collector()
        await standalone.wait_until_stopped(stop)
    finally:
        _say("stopping")
        await standalone.aclose()
    _say("stopped")


def _tame_garbage_collector() -> None:
    """What exists now lives as long as the process, and entries make no cycles: young collections stay short, full ones rare.

    A young generation of 100,000 objects was seen to stop the loop for 21 ms at each collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 1_000)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:  # not on every platform; asyncio's own loop serves, slower
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _say(line: str) -> None:
    print(line, flush=True)
