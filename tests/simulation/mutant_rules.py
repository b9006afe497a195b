"""By which rules random worlds may catch each mutant. By another it would be luck, or a mistake of a check."""

from __future__ import annotations

from collections.abc import Mapping, Set

from tests.simulation.mutants_dispatch import DISPATCH_RULES

RULES: Mapping[str, Set[str]] = {
    "acknowledge before sync": {"S1", "S2", "S3", "S8"},  # S8: the journal is damaged then, and the bookie refuses to start
    "answer a fence before it is durable": {"S3"},
    "fence not by reads": {"L5", "S3", "S4", "S6"},
    "read for a recovery without fencing": {"L10", "L5"},
    "drop holes when saving a cursor": {"C2", "H7"},
    "save no part of a batch": {"C2"},
    "save no delivery counts": {"C8"},
    "save sequence ids of another moment": {"C6", "H3", "H2"},  # H2: a message is stored twice
    "count a timeout as a negative": {"L10", "L5"},
    "take the mark after the flush": {"S6", "S2", "S3"},
    "take an empty cache for an empty checkpoint": {"S6", "S2", "S3"},
    "rename the mark without directory sync": {"S7", "S8", "S2", "S3"},
    "deny what cannot be read": {"S2", "S5", "L5", "L10"},
    "read past the half that is flushed": {"S2", "S4", "S5", "IndexError"},  # or it stumbles over what is not there
    "confirm below the ack quorum": {"L3"},
    "recover without waiting for copies": {"L10"},
    "record an end without closing": {"M2"},
    "write the chain again after a conflict": {"M1", "M2", "M3", "M6", "C2", "C3", "C6", "C7", "C8"},
    "name what was pushed when saving sequence ids": {"H3", "H1"},  # H1: told stored, as a repetition
    "believe the snapshot of sequence ids alone": {"H3", "H2"},  # H2: a message is stored twice
    "save no chunks with sequence ids": {"H3"},
    "let producers in while chunks are under way": {"H3"},
    "take a blank bookie for a new one": {"S11", "S2", "S5"},
    "limbo answers a certain no": {"S2", "S5"},
    "limbo takes regular adds": {"S3", "S11", "L5"},
    "limbo denies to readers": {"S2", "S5", "L5", "L10"},
    "count lives in metadata first": {"S8"},
    "collect what can be brought back": {"S10"},
    "collect what one listing lacks": {"S10"},
    "collect what one listing of any follower lacks": {"S10"},
    "count failed bookies while they are replaced": {"L3"},
    "count newcomers before metadata names them": {"L3"},
    "replace in metadata without sending again": {"L3", "V3", "V9"},
    "choose a bookie again that had left": {"L2"},
    "publish a recoverys ensemble change early": {"L2"},
    "stamp recovered copies anew": {"L4", "L7"},
    "append again what recovery found": {"M3", "M4", "M5", "H2", "H3"},
    "answer again what recovery found": {"M3", "M4", "M5", "V9", "H3", "ValueError"},  # a publish group counts its answers
    "record an end that recovery did not find": {"M2", "M3"},
    # or the end of that ledger fits nothing, and the broker's own assertion says so
    # (V7, C5: what came to it before it was in the chain is sent to nobody, and counted by nobody)
    "resume before the chain names the next ledger": {"M3", "H1", "H3", "H5", "V7", "C5", "AssertionError"},
    "answer what lies above the recovered end": {
        "M3",
        "H1",
        "H3",
        "H4",
        "H8",
    },  # H8: a reader is given what the topic does not have
    "take ledgers of this opening for orphans": {
        "M7",
        "V4",
        "C2",
        "V9",
        "ValidationError",
    },  # or the chain refuses to name it twice
    "look for no orphans": {"M8"},
    "serve bundles whose record is gone": {"O1", "V4", "H5"},  # H5: consumers stay where nothing comes to any more
    "give bundles away before topics are unloaded": {"O1"},
    "say that topics are unloaded before they are": {"O1"},
    "put adds into the cache behind their answers": {"S2", "S4", "S5", "S6"},
    "take a repeated add in spite of the fence": {"S3"},
    "move the mark although the flush failed": {"S6", "S2", "S3", "S5"},
    "let checkpoints overlap": {"S7", "S8"},
    "take restored disks for the present ones": {"S2", "S3", "S5", "S11"},
    "start from what power loss can take": {"S7", "S8"},
    "cut damage like a torn tail": {"S8"},
    "keep explicit lacs in memory": {"S6"},
    "replay the segment of the mark from its beginning": {"V8"},
    "take one denial for enough": {"L5", "L10"},
    "insist on an ensemble whoever recovers": {"L1", "L2"},
    "take the length of a ledger from its last fragment": {"L12"},
    # or what it writes again is not what its writer-to-be expects next, and an assertion says so
    "begin a recovery before the last fragment": {"V1", "L2", "L5", "L10", "AssertionError"},
    "take a lost answer for a refusal": {"M1", "M3", "M7", "L14", "C6"},  # C6: a cursor's record too was written after all
    "forget fences with what is deleted": {"S3", "L13"},
    "drop an empty ledger without fencing it": {"L13", "M2", "M3", "M6"},
    "give up one append and go on": {"M5", "H2", "H3", "H4", "V7"},
    "keep as pushed what was never appended": {"V9", "H3"},
    "take appends behind a refusal that is not heard": {"M5", "H3", "H4"},
    "trim by a size that grows": {"M6"},
    "trim whatever the size": {"M6"},
    "leave cursors in what is trimmed": {"M7"},
    # M6: what counts as acknowledged may be trimmed
    "keep what was acknowledged during a reset": {"C4", "H13", "H5", "H6", "M6"},
    "go on at the end without a cursor ledger": {"C3", "C6", "H5", "H6", "M6"},
    "delete the record of a topic alone": {"M3"},
    "begin a topic with any id": {"H2"},
    "reset to the beginning of a batch": {"C4", "H7", "H13"},
    "save a reset to the beginning of a batch": {"C2", "H7"},
    "deliver what was read before a seek": {"H5", "H6", "H8", "H13", "V7"},
    "close without saving cursors": {"C2", "H7"},
    "be content with the round under way": {"C2", "C8", "H7"},
    "retire a cursor ledger before its record": {"C2"},
    "believe the wall clock": {"M6"},
    "admit adds without a bound": {"S12"},
    "charge for ever for what newcomers got": {"V9"},
    "charge for ever for what nobody fetched": {"V9"},
    "charge for ever for what was not sent": {"V9"},
    "open topics slowly": {"V4", "V9"},  # V9: look-ups wait for it (0x1168f811f)
    "start again slowly": {"V8"},
    "ask for a checkpoint at admission": {"V6"},
    "collect logs by the ledgers in memory": {"S9"},
    "leave logs that nothing refers to": {"V6"},
    "count on what the mark has passed": {"C5", "V7"},  # a subscription without backlog waits for nothing
    "terminate before appends are refused": {"M10"},
    "open a terminated topic like any other": {"M10"},
    "terminate before the last entry": {"M10"},
    "count versions up after a conflict": {"O2", "M1"},
    "delete whatever is there": {"O2"},
    "leave what a session made": {"O3", "V9"},  # nobody may serve what a session that is over still owns
    "read for a recovery behind the first fence": {"L11", "L10", "L5"},
    "leave a recovery to whoever began it": {"V1", "V2", "V4", "V9"},
    "begin the epochs of a bundle again": {"O4"},
    "reset in the same generation": {"C1", "C2", "C4"},
    "give up a log whose read failed once": {"S8", "V1", "V2", "V4", "V7", "V9"},  # V: when nobody else can be asked
    "wait for metadata after a silence": {"V3", "V4", "V9"},
    "save cursors whoever owns the topic": {"C7", "C1", "C2", "H7"},
    "take ids that somebody else took": {"L14"},
    "answer the last of a group first": {"H4"},
    "answer before it can be read": {"M9", "V7"},
    # C4: a cursor was reset into what had gone; H2: the sequence ids of what had gone were not saved; H8: it is left out
    "trim without asking the cursors": {"M6", "C3", "C4", "C6", "H2", "H8"},
    **DISPATCH_RULES,
}
