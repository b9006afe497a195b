"""Finding and running `helm`. Tests that need it are skipped where it is not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.charts.chart_pages import CHART

CACHE = Path(os.environ.get("CEPHEID_KUBERNETES_CACHE", Path.home() / ".cache" / "cepheid-kubernetes"))
MISSING = "helm is not here: install it, or build it with `python -m tests.kubernetes helm`, which takes Go"


def find_helm() -> str | None:
    """Return the command: $HELM, on PATH, or the one that the tests on a real Kubernetes built."""
    built = CACHE / "bin" / "helm"
    return os.environ.get("HELM") or shutil.which("helm") or (str(built) if built.exists() else None)


def template(*arguments: str, release: str = "my", namespace: str = "pub") -> subprocess.CompletedProcess[str]:
    """Run `helm template` on the chart."""
    helm = find_helm()
    assert helm is not None, MISSING
    # Without a cluster Helm assumes an old Kubernetes.
    command = [helm, "template", release, str(CHART), f"--namespace={namespace}", "--kube-version=1.34.0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def render(*arguments: str, release: str = "my", namespace: str = "pub") -> list[dict[str, Any]]:
    """Return the manifests that the chart renders to."""
    done = template(*arguments, release=release, namespace=namespace)
    assert done.returncode == 0, done.stderr
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that in C is ten times as fast
    return [manifest for manifest in yaml.load_all(done.stdout, Loader=loader) if manifest]
