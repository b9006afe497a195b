"""The text format of Prometheus (version 0.0.4), written by hand: a few lines, so that processes do not need a library.

Names follow Prometheus: base units, `_total` for what only increases, no label per message, consumer or ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    labels: Labels
    suffix: str = ""  # `_sum`, `_count`, `_bucket`


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one name."""

    name: str
    kind: Kind
    help: str
    samples: Sequence[Sample]


def counter(name: str, help: str, value: float, **labels: str) -> Family:
    assert name.endswith("_total"), f"{name} is a counter without _total"
    return Family(name, "counter", help, (Sample(value, labels),))


def gauge(name: str, help: str, value: float, **labels: str) -> Family:
    return Family(name, "gauge", help, (Sample(value, labels),))


def histogram(name: str, help: str, buckets: Iterable[tuple[float, int]], total: float, **labels: str) -> Family:
    """`buckets`: (upper bound, observations up to it and above the previous bound), ascending; the last bound is infinity."""
    samples, count = [], 0
    for bound, observations in buckets:
        count += observations
        samples.append(Sample(count, {**labels, "le": _number(bound)}, "_bucket"))
    return Family(name, "histogram", help, (*samples, Sample(total, labels, "_sum"), Sample(count, labels, "_count")))


def encode(families: Iterable[Family]) -> str:
    """Families of one name (for example, one per bookie) become one block, as the format requires."""
    merged: dict[str, list[Family]] = {}
    for family in families:
        merged.setdefault(family.name, []).append(family)
    lines: list[str] = []
    for name, parts in merged.items():
        lines += (f"# HELP {name} {_escaped(parts[0].help)}", f"# TYPE {name} {parts[0].kind}")
        lines += (_line(name, sample) for part in parts for sample in part.samples)
    return "\n".join(lines) + "\n"


def _line(name: str, sample: Sample) -> str:
    labels = ",".join(f'{label}="{_escaped(value, quotes=True)}"' for label, value in sample.labels.items())
    return (
        f"{name}{sample.suffix}{{{labels}}} {_number(sample.value)}" if labels else f"{name}{sample.suffix} {_number(sample.value)}"
    )


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
