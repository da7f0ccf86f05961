"""Puts the new core in the place of the old engine, until that is deleted.

``PP_OFFLOAD_CORE=1`` runs everything on the core, so that both can be tested by the same programs.
It is no option for users: plans are still made of what the old engine does.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pp_offload._core import chunk, group, saved, split_backward, statistics, wiring
from pp_offload._groups import chunk as old_chunk
from pp_offload._groups import group as old_group
from pp_offload._groups import split_backward as old_split_backward
from pp_offload._groups import wiring as old_wiring
from pp_offload._transfer import saved_tensor, ticket
from pp_offload._transfer import statistics as old_statistics


def switch() -> None:
    """From now on, who imports a class of the old engine gets that of the core."""
    names: dict[ModuleType, dict[str, Any]] = {
        old_chunk: {"Chunk": chunk.Chunk},
        old_group: {"Group": group.Group, "GroupState": group.GroupState, "Counts": group.Counts},
        old_wiring: {"Wiring": wiring.Wiring},
        old_split_backward: {
            "BackwardPass": split_backward.BackwardPass,
            "SplitBackward": split_backward.SplitBackward,
            "WeightPass": split_backward.WeightPass,
        },
        saved_tensor: {
            "Packed": saved.Packed,
            "Resident": saved.Resident,
            "SavedWrapper": saved.Wrapped,
        },
        ticket: {"SavedActivation": saved.Saved, "give_back": lambda tickets: None},
        old_statistics: {"collect": statistics.collect},
    }
    for module, classes in names.items():
        vars(module).update(classes)
