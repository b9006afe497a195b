"""The dispatch core for each type of subscription."""

from __future__ import annotations

from cepheid_broker.dispatch.dispatch_failover import FailoverDispatch
from cepheid_broker.dispatch.dispatch_key_shared import KeySharedDispatch
from cepheid_broker.dispatch.dispatch_shared import SharedDispatch
from cepheid_broker.dispatch.effects import AckView, DispatchCore, DispatchLimits, DispatchPolicies
from cepheid_broker.dispatch.key_sharing import KeySharing
from cepheid_wire import pulsar_api_pb2 as pb

EXCLUSIVE = pb.CommandSubscribe.Exclusive
SHARED = pb.CommandSubscribe.Shared
FAILOVER = pb.CommandSubscribe.Failover
KEY_SHARED = pb.CommandSubscribe.Key_Shared


def new_core(
    kind: int, acks: AckView, limits: DispatchLimits, policies: DispatchPolicies, partition_index: int, sharing: KeySharing
) -> DispatchCore:
    if kind == SHARED:
        return SharedDispatch(acks, limits, policies)
    if kind == KEY_SHARED:
        return KeySharedDispatch(acks, limits, policies, sharing.new_owners(), in_order=not sharing.out_of_order)
    return FailoverDispatch(acks, limits, partition_index=partition_index, announces=kind == FAILOVER)


def shares_entries(kind: int | None) -> bool:
    """Return whether entries are acknowledged one by one by their receivers, never cumulatively (protocol.md §15)."""
    return kind in (SHARED, KEY_SHARED)


def type_name(kind: int | None) -> str:
    return "None" if kind is None else pb.CommandSubscribe.SubType.Name(kind)
