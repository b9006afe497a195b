"""Compare manifests with the schemas of Kubernetes itself, which the package kubernetes-validate has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OLDEST, NEWEST = "1.30", "1.34"
"""Versions of Kubernetes that the chart is for: Chart.yaml, docs/kubernetes.md, and the node of tests/kubernetes."""
Problems = Callable[[Mapping[str, Any]], list[str]]


def schema_problems(manifests: Sequence[Mapping[str, Any]], version: str) -> list[str]:
    """Return a line about each field that this version of Kubernetes would refuse or does not know."""
    return [
        f"{manifest['kind']} {manifest['metadata']['name']}: {problem}"
        for manifest in manifests
        for problem in _checker(manifest["kind"], manifest["apiVersion"], version)(manifest)
    ]


@functools.cache
def _checker(kind: str, api_version: str, version: str) -> Problems:
    """Return a check for one kind of object. Kinds that are not of Kubernetes itself, such as PodMonitor, always pass."""
    from jsonschema import Draft202012Validator
    from kubernetes_validate.utils import schema_contents
    from referencing import Registry, Resource

    group, _, name = api_version.rpartition("/")
    file = f"{kind.lower()}-{group.partition('.')[0]}-{name}.json" if group else f"{kind.lower()}-{name}.json"
    try:
        schema = schema_contents(f"kubernetes-json-schema/v{_full(version)}-local-strict/{file}", version)
    except FileNotFoundError:
        return lambda manifest: []
    registry = Resource.from_contents(schema) @ (_definitions(version) @ Registry())
    validator = Draft202012Validator(schema, registry=registry)
    return lambda manifest: [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(manifest)
    ]


@functools.cache
def _definitions(version: str) -> Any:
    from kubernetes_validate.utils import schema_contents
    from referencing import Resource

    return Resource.from_contents(
        schema_contents(f"kubernetes-json-schema/v{_full(version)}-local-strict/_definitions.json", version)
    )


@functools.cache
def _full(version: str) -> str:
    """Return the patch release of which the package has the schemas."""
    from kubernetes_validate.utils import all_versions

    return next(str(found) for found in all_versions() if f"{found}.".startswith(f"{version}."))
