"""Dispatch: which consumer gets which entry, decided by cores without I/O. README.md has the rules."""

from cepheid_broker.dispatch.catch_up_turns import CatchUpTurns
from cepheid_broker.dispatch.counted_group import CountedGroup, count_group
from cepheid_broker.dispatch.dispatch_kinds import EXCLUSIVE, FAILOVER, KEY_SHARED, new_core, shares_entries, type_name
from cepheid_broker.dispatch.dispatcher import READ_ENTRIES, Dispatcher, ReadAheadBudget, SharedDispatch
from cepheid_broker.dispatch.effects import DispatchLimits, DispatchPolicies, HashRange, Idle, Why
from cepheid_broker.dispatch.holders import COMES_AGAIN_ON, MAX_REASONS
from cepheid_broker.dispatch.key_hash import hash_of_metadata
from cepheid_broker.dispatch.key_sharing import KeySharing, key_sharing_of
from cepheid_broker.dispatch.non_persistent_dispatch import NonPersistentDispatch, new_dispatch

__all__ = [
    "COMES_AGAIN_ON",
    "EXCLUSIVE",
    "FAILOVER",
    "KEY_SHARED",
    "MAX_REASONS",
    "READ_ENTRIES",
    "CatchUpTurns",
    "CountedGroup",
    "DispatchLimits",
    "DispatchPolicies",
    "Dispatcher",
    "HashRange",
    "Idle",
    "KeySharing",
    "NonPersistentDispatch",
    "ReadAheadBudget",
    "SharedDispatch",
    "Why",
    "count_group",
    "hash_of_metadata",
    "key_sharing_of",
    "new_core",
    "new_dispatch",
    "shares_entries",
    "type_name",
]
