"""Warns of groups that were asked for and do nothing, once for each name.

A name is asked for by a pattern of module names, or by a marker that ran. In a step that has a
forward with grad, groups of that name should run, and save tensors.

    group 'attn' offloaded nothing: none of its 4 groups saved a tensor of at least ...
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pp_offload._hooks.regions import was_warned_of

logger = logging.getLogger(__name__)


NUM_STEPS = 3
"""After so many steps nothing is looked at any more, until more is asked for."""


class GroupUse(NamedTuple):
    """What a step did under one name."""

    num_groups: int
    num_tensors: int
    """Payloads that could leave the device, whether or not the plan let them."""

    num_open: int = 0
    """Groups that were started and not committed."""

    num_cut_off: int = 0
    """Groups in which the forward raised. Whatever they lack, the exception has said why."""


class IdleGroups:
    """Knows which names were asked for, and which it has warned of.

    Attributes:
        num_steps_left: That are looked at.
        was_disabled: Whether offload was off at any time in the step, which says nothing then.
    """

    def __init__(self) -> None:
        self.was_disabled = False
        self.num_steps_left = NUM_STEPS
        self._wanted: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        """Of those, what the step that runs need not have yet."""

        self._said: set[str] = set()

    def expect(self, names: Iterable[str]) -> None:
        """Groups of these names are to come in every step, from the next begin of one on."""
        names = list(names)
        self._wanted.update(names)
        self._new.update(names)
        self.num_steps_left = NUM_STEPS

    def forget(self, names: Iterable[str]) -> None:
        """Groups of these names are not to come any more."""
        names = list(names)
        self._wanted.subtract(names)
        self._new.subtract(names)

    def begin_step(self) -> None:
        """What was asked for before is to come from now on."""
        self._new.clear()

    def stop(self) -> None:
        """Look at nothing any more, until more is asked for."""
        self.num_steps_left = 0

    def check(
        self, found: Mapping[str, GroupUse], smallest_numel: int, elsewhere: str = ""
    ) -> None:
        """Warn of names that did nothing in a step.

        Args:
            found: What the step did, by name.
            smallest_numel: Elements that a tensor needs at least to leave, in the step's chunks.
            elsewhere: What is wrong where tensors are on another device; empty if none is.
        """
        self.num_steps_left -= 1
        was_cut_off = any(use.num_cut_off for use in found.values())
        wanted = self._wanted - +self._new
        missing = set() if was_cut_off else {*wanted}  # they may have been still to come
        for name in sorted({*found, *missing}):
            problem = _problem(found.get(name), smallest_numel, elsewhere)
            if problem is None or was_warned_of(f"group '{name}'"):
                continue  # nothing, or a checkpoint around it was said to be why
            if name not in self._said:
                self._said.add(name)
                logger.warning("group '%s' %s", name, problem)


def _problem(use: GroupUse | None, smallest_numel: int, elsewhere: str) -> str | None:
    if use is None:
        return (
            "never ran: a step had forwards, but none went through the modules its patterns match; "
            "look whether the step calls them, and not a copy or a function of theirs, or compiles "
            "around them"
        )
    num_groups = use.num_groups - use.num_cut_off
    num_committed = num_groups - use.num_open
    if num_groups == 0:
        return None
    if num_committed == 0:
        return (
            f"offloaded nothing: it was started {num_groups} times and never committed; call "
            "group_commit(output, name), with the name it was started with, at the end of its "
            "forward"
        )
    if use.num_tensors == 0:
        return (
            f"offloaded nothing: none of its {num_committed} groups saved a tensor of at least "
            f"min_offloaded_tensor_size={smallest_numel} elements that may leave the device; lower "
            "that, or look whether the group is around the layer's forward and outside "
            f"torch.compile{'; ' * bool(elsewhere)}{elsewhere}"
        )
    return None
