"""The pictures of the demo, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.flights_spark.checks import StreamSeen


def plot_all(directory: Path, delays: Sequence[Mapping[str, Any]], seen: StreamSeen, kill: Mapping[str, Any]) -> list[Path]:
    """Draw the delays, the streaming query and the scan during which a bookie was killed; return the paths of the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawings: list[tuple[str, Callable[[Any], None]]] = [
        ("delays.png", lambda axes: _draw_delays(axes, delays)),
        ("stream.png", lambda axes: _draw_stream(axes, seen)),
        ("scan.png", lambda axes: _draw_scan(axes, kill)),
    ]
    paths = []
    for name, draw in drawings:
        figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
        draw(axes)
        paths.append(directory / name)
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _draw_delays(axes: Any, delays: Sequence[Mapping[str, Any]]) -> None:
    carriers = sorted({row["carrier"] for row in delays})
    hours = sorted({row["hour"] for row in delays})
    means = [[float("nan")] * len(hours) for _ in carriers]
    for row in delays:
        means[carriers.index(row["carrier"])][hours.index(row["hour"])] = row["mean_minutes"]
    image = axes.imshow(means, aspect="auto", cmap="RdYlGn_r", vmin=-10, vmax=60)
    axes.set_xticks(range(len(hours)), hours)
    axes.set_yticks(range(len(carriers)), carriers)
    axes.set(title="Mean departure delay in minutes", xlabel="scheduled hour in New York", ylabel="carrier")
    axes.figure.colorbar(image)


def _draw_stream(axes: Any, seen: StreamSeen) -> None:
    axes.plot(*zip(*seen.published, strict=True), label="published")
    axes.step(*zip(*seen.counted, strict=True), where="post", label="in the query's totals")
    axes.axvspan(seen.killed_at_s, seen.back_at_s, color="tab:red", alpha=0.15, label="from SIGKILL to the next micro-batch")
    axes.set(title="Streaming query whose driver is killed", xlabel="seconds", ylabel="events")
    axes.legend(loc="upper left")


def _draw_scan(axes: Any, kill: Mapping[str, Any]) -> None:
    axes.step(*zip(*kill["finished"], strict=True), where="post", label="tasks done")
    if kill["acted_at"] is not None:
        axes.axvline(kill["acted_at"][0], color="tab:red", label="SIGKILL of a bookie")
    axes.set(title="Batch scan during which a bookie is killed", xlabel="seconds", ylabel="tasks")
    axes.legend()
