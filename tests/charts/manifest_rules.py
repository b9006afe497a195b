"""Rules that every rendered manifest of the chart has to keep; `problems` names what breaks one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cepheid_cli.settings_loader import load_settings, settings_of, variable_of
from cepheid_cli.settings_page import ROLES

Manifest = Mapping[str, Any]

MAX_NAME = 63
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_MODELS = {role.command: role.model for role in ROLES}
_VARIABLES = {variable_of(role.prefix, name) for role in ROLES for name in settings_of(role.model)}


def problems(manifests: Sequence[Manifest], scratch: Path) -> list[str]:
    """Return a line about each broken rule. `scratch`: a directory for settings files."""
    found: list[str] = []
    for manifest in manifests:
        place = f"{manifest['kind']} {manifest['metadata']['name']}"
        found += [f"{place}: {problem}" for problem in _name_problems(manifest)]
        if (pod := pod_of(manifest)) is not None:
            found += [f"{place}: {problem}" for problem in _pod_problems(pod, manifest, manifests)]
        if manifest["kind"] == "Service":
            found += [f"{place}: {problem}" for problem in _service_problems(manifest, manifests)]
        if manifest["kind"] == "NetworkPolicy":
            found += [f"{place}: {problem}" for problem in _policy_problems(manifest, manifests)]
        if manifest["kind"] == "ConfigMap":
            found += [f"{place}: {problem}" for problem in _settings_problems(manifest, scratch)]
    keys = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    return found + [f"{kind} {name} is rendered twice" for kind, name in sorted({key for key in keys if keys.count(key) > 1})]


def pod_of(manifest: Manifest) -> Manifest | None:
    """Return the spec of the pods that a manifest makes."""
    if manifest["kind"] == "Pod":
        spec: Manifest = manifest["spec"]
        return spec
    if manifest["kind"] in ("StatefulSet", "Job", "Deployment"):
        template: Manifest = manifest["spec"]["template"]["spec"]
        return template
    return None


def labels_of(manifest: Manifest) -> Manifest:
    """Return the labels of the pods that a manifest makes."""
    owner = manifest if manifest["kind"] == "Pod" else manifest["spec"]["template"]
    labels: Manifest = owner["metadata"]["labels"]
    return labels


def containers_of(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def _name_problems(manifest: Manifest) -> Iterator[str]:
    name = manifest["metadata"]["name"]
    # Pods of a StatefulSet get a number, and a label with the name and a hash of ten characters.
    longest = len(name) + 11 if manifest["kind"] == "StatefulSet" else len(name)
    if longest > MAX_NAME or not _NAME.fullmatch(name):
        yield f"a name has at most {MAX_NAME} characters, all of them a-z, 0-9 and -"
    labels = dict(manifest["metadata"].get("labels", {}))
    if labels.get("app.kubernetes.io/instance") is None or labels.get("app.kubernetes.io/component") is None:
        yield "the common labels are missing"
    yield from (f"label {key} is too long" for key, value in labels.items() if len(value) > MAX_NAME)


def _pod_problems(pod: Manifest, manifest: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    if pod.get("enableServiceLinks") is not False:
        yield "enableServiceLinks must be false: variables of services look like settings"
    if pod.get("automountServiceAccountToken") and "serviceAccountName" not in pod:
        yield "a token is mounted without an account of its own"
    security = pod.get("securityContext", {})
    if not security.get("runAsNonRoot") or security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "the pod is not restricted: runAsNonRoot and seccompProfile"
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    claims = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", ())}
    maps = {one["metadata"]["name"] for one in manifests if one["kind"] == "ConfigMap"}
    for volume in pod.get("volumes", ()):
        if "configMap" in volume and volume["configMap"]["name"] not in maps:
            yield f"there is no ConfigMap {volume['configMap']['name']}"
    for container in containers_of(pod):
        yield from (f"{container['name']}: {problem}" for problem in _container_problems(container, volumes | claims))
    if manifest["kind"] == "StatefulSet":
        for container in pod["containers"]:
            yield from (
                f"{container['name']} has no {probe}"
                for probe in ("startupProbe", "readinessProbe", "livenessProbe")
                if probe not in container
            )
            named = {port["name"] for port in container["ports"]}
            yield from (f"{container['name']}: a probe asks port {port}" for port in _probed(container) if port not in named)
        heads = [
            one for one in manifests if one["kind"] == "Service" and one["metadata"]["name"] == manifest["spec"]["serviceName"]
        ]
        if not heads or heads[0]["spec"].get("clusterIP") != "None":
            yield "it has no headless service"


def _probed(container: Manifest) -> Iterator[str]:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        for kind in ("httpGet", "tcpSocket"):
            if kind in container.get(probe, {}):
                yield container[probe][kind]["port"]


def _container_problems(container: Manifest, volumes: set[str]) -> Iterator[str]:
    image = container["image"]
    if not re.search(r":[^/:]+$", image) or image.endswith(":latest"):
        yield f"image {image} has no fixed tag"
    security = container.get("securityContext", {})
    if security.get("allowPrivilegeEscalation") is not False or security.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "the container is not restricted"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "its root file system can be written"
    if "/tmp" not in {mount["mountPath"] for mount in container.get("volumeMounts", ())} and container["name"] != "configure":
        yield "it has no /tmp"
    resources = container.get("resources", {})
    if not {"cpu", "memory"} <= set(resources.get("requests", {})) or "memory" not in resources.get("limits", {}):
        yield "requests of cpu and memory, and a limit of memory, are needed"
    yield from (
        f"volume {mount['name']} does not exist" for mount in container.get("volumeMounts", ()) if mount["name"] not in volumes
    )
    for variable in container.get("env", ()):
        name = variable["name"]
        if re.match(r"CEPHEID_(BROKER|BOOKIE|STANDALONE)_", name) and name not in _VARIABLES:
            yield f"{name} is not a setting"


def _service_problems(service: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    selector = {key: value for key, value in service["spec"]["selector"].items() if not key.startswith("statefulset.")}
    chosen = [one for one in manifests if pod_of(one) is not None and selector.items() <= labels_of(one).items()]
    if not chosen:
        yield "it selects no pod"
    for one in chosen:
        named = _port_names(one)
        yield from (
            f"port {port['targetPort']} does not exist" for port in service["spec"]["ports"] if port["targetPort"] not in named
        )


def _policy_problems(policy: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    selector = policy["spec"]["podSelector"]["matchLabels"]
    chosen = [one for one in manifests if pod_of(one) is not None and selector.items() <= labels_of(one).items()]
    if not chosen:
        yield "it selects no pod"
    named = {name for one in chosen for name in _port_names(one)}
    for rule in policy["spec"]["ingress"]:
        yield from (
            f"port {port['port']} does not exist"
            for port in rule["ports"]
            if isinstance(port["port"], str) and port["port"] not in named
        )


def _port_names(manifest: Manifest) -> set[str]:
    pod = pod_of(manifest)
    assert pod is not None
    return {port["name"] for container in pod["containers"] for port in container.get("ports", ())}


def _settings_problems(manifest: Manifest, scratch: Path) -> Iterator[str]:
    """The process would start with these settings, and they have nothing twice."""
    for name, text in manifest["data"].items():
        if not name.endswith(".toml"):
            continue
        file = scratch / name
        file.write_text(text)
        try:
            tomllib.loads(text)
            load_settings(_MODELS[name.removesuffix(".toml")], flags={}, environment_prefix="", file=file, environment={})
        except Exception as error:
            yield f"{name}: {error}"
