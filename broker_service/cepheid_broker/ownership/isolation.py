"""Isolation policies: which brokers may serve a namespace. A function of the policies and of the brokers that run, without I/O.

A namespace that a policy matches is served by the policy's primary brokers. When fewer of them are available than `min_limit`, the
secondary ones serve as well. All other namespaces are served by brokers that are primary in no policy. When that leaves no broker,
any broker serves: a policy never makes topics unavailable while brokers run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from cepheid_broker.errors import NotAllowedError
from cepheid_broker.linear_pattern import compile_pattern
from cepheid_metadata import IsolationPolicies, IsolationPolicy

log = logging.getLogger(__name__)

Addresses = Mapping[str, Mapping[str, str]]
"""Addresses by scheme, by broker id."""


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    """A policy with its expressions ready to match."""

    name: str
    policy: IsolationPolicy
    namespaces: tuple[Any, ...]
    primary: tuple[Any, ...]
    secondary: tuple[Any, ...]


def compile_policy(name: str, policy: IsolationPolicy) -> CompiledPolicy:
    """Return the policy with its expressions compiled. Raises NotAllowedError for an expression that is not valid in RE2."""
    return CompiledPolicy(
        name,
        policy,
        tuple(compile_pattern(text, "namespaces") for text in policy.namespaces),
        tuple(compile_pattern(text, "brokers") for text in policy.primary),
        tuple(compile_pattern(text, "brokers") for text in policy.secondary),
    )


class IsolationRules:
    """All isolation policies of a cluster, compiled."""

    def __init__(self, record: IsolationPolicies | None = None) -> None:
        """Policies that cannot be compiled are logged and ignored: they were checked when they were set."""
        self._policies: list[CompiledPolicy] = []
        for name, policy in sorted((record.policies if record is not None else {}).items()):
            try:
                self._policies.append(compile_policy(name, policy))
            except NotAllowedError as error:
                log.warning("isolation.unusable", extra={"policy": name, "error": str(error)})

    def __repr__(self) -> str:
        return f"<IsolationRules {', '.join(policy.name for policy in self._policies) or 'none'}>"

    @property
    def is_empty(self) -> bool:
        return not self._policies

    def policy_of(self, namespace: str) -> CompiledPolicy | None:
        """Return the policy that matches `tenant/namespace`, the first one by name."""
        return next((policy for policy in self._policies if _matches(policy.namespaces, (namespace,))), None)

    def policies_with_primary(self, names: tuple[str, ...]) -> list[CompiledPolicy]:
        """Return the policies in which a broker with these names is primary."""
        return [policy for policy in self._policies if _matches(policy.primary, names)]

    def allowed(self, namespace: str, brokers: Addresses, loads: Mapping[str, float]) -> list[str]:
        """Return the ids of the brokers that may serve the namespace, in the given order."""
        if not self._policies:
            return list(brokers)
        names = {broker_id: names_of(broker_id, addresses) for broker_id, addresses in brokers.items()}
        policy = self.policy_of(namespace)
        if policy is None:
            return [broker_id for broker_id in brokers if not self.policies_with_primary(names[broker_id])] or list(brokers)
        primary = [broker_id for broker_id in brokers if _matches(policy.primary, names[broker_id])]
        limit = policy.policy.usage_threshold / 100
        available = [broker_id for broker_id in primary if limit >= 1.0 or loads.get(broker_id, 0.0) < limit]
        if primary and len(available) >= policy.policy.min_limit:
            return primary
        secondary = [
            broker_id for broker_id in brokers if _matches(policy.secondary, names[broker_id]) and broker_id not in primary
        ]
        return [*primary, *secondary] or list(brokers)

    def allowed_at_most(self, namespace: str, brokers: Addresses) -> list[str]:
        """Return the ids of the brokers that may serve the namespace under any load: secondary ones too if load decides."""
        return self.allowed(namespace, brokers, dict.fromkeys(brokers, inf))


NO_ISOLATION = IsolationRules()


def names_of(broker_id: str, addresses: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names by which a policy may match a broker: its id, its admin API's address, and the host of that address."""
    address = addresses.get("http") or addresses.get("https") or ""
    host = address.rpartition(":")[0]
    return tuple(dict.fromkeys(name for name in (broker_id, address, host) if name))


def _matches(patterns: tuple[Any, ...], names: tuple[str, ...]) -> bool:
    return any(pattern.fullmatch(name) is not None for pattern in patterns for name in names)
