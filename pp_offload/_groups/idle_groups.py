"""Warn of expected groups that do nothing, once for each name.

    group 'attn' offloaded nothing: none of its 4 groups saved a tensor of at least ...

A pattern of module names makes its group expected, and so does a marker that runs. In a step with a
forward with grad, expected groups should run and save tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pp_offload._common.processes import logger_of
from pp_offload._core.eligibility import Eligibility
from pp_offload._groups.plan import ChunkRecord
from pp_offload._hooks import was_warned_of

logger = logger_of(__name__)

NUM_STEPS = 3  # that are checked after a name is expected

_NEVER_RAN = (
    "never ran: a step had forwards, but none went through the modules its patterns match; look "
    "whether the step calls them, and not a copy or a function of theirs; where the whole model is "
    "compiled around them, compile each of them instead; remove() groups of a model that is gone"
)
_NEVER_COMMITTED = (
    "offloaded nothing: it was started {} times and never committed; call "
    "group_commit(output, name), with the name it was started with, at the end of its forward"
)
_NO_TENSOR = (
    "offloaded nothing: none of its {} groups saved a tensor of at least "
    "min_offloaded_tensor_size={} elements (a number of elements, not bytes) that may leave the "
    "device; "
)
_LARGEST = (
    "the largest was {0}, {1} elements: give min_offloaded_tensor_size={1} to OffloadConfig or "
    "init_chunk_handler to offload it"
)
_NONE_AT_ALL = (
    "it saved no smaller one either: look whether the group is around the layer's forward, outside "
    "torch.compile and around no checkpoint of this package, which offloads its own inputs"
)

_NO_GROUP = (
    "no group ran in steps of an attached schedule, so this rank offloads nothing; unless that is "
    "meant, mark groups in the model, or give patterns of module names, as in "
    "attach(schedule, groups={'mlp': 'layers.*.mlp'})"
)


class IdleGroups:
    """Checks steps for expected names."""

    def __init__(self) -> None:
        self.was_disabled = False  # or groups removed, in this step, which then is not checked
        self.num_steps_left = NUM_STEPS
        self.expects_any = False  # as a schedule is attached, and no group has started yet
        self._expected: Counter[str] = Counter()
        self._expected_at_begin: frozenset[str] = frozenset()
        self._warned: set[str] = set()

    def expect(self, names: Iterable[str]) -> None:
        """Expect groups of these names in every step, from the next begin of a step on."""
        self._expected.update(names)
        self.num_steps_left = NUM_STEPS

    def forget(self, names: Iterable[str]) -> None:
        """Undo :meth:`expect`. Another model may have the names next, and is warned of anew."""
        self._expected.subtract(names)
        self._warned.difference_update(names)
        self.was_disabled = True  # or the end of this step would warn of the old model again

    def begin_step(self, *, is_enabled: bool) -> None:
        """Begin a step that must have all names expected so far."""
        self.was_disabled = not is_enabled
        self._expected_at_begin = frozenset(+self._expected)

    @property
    def is_checking(self) -> bool:
        return self.num_steps_left > 0 and not self.was_disabled

    def check(
        self, records: Iterable[ChunkRecord], smallest_numel: int, eligibility: Eligibility
    ) -> None:
        """Warn of names that did nothing in a step that is to be checked."""
        self.num_steps_left -= 1
        started, committed, tensors = Counter[str](), Counter[str](), Counter[str]()
        for record in records:
            started.update(record.shape.names)
            committed.update(record.num_committed)
            tensors.update(record.num_tensors)
        if self.expects_any and not (started or self._expected_at_begin or self.num_steps_left > 1):
            self.expects_any = False
            logger.warning(_NO_GROUP)
        for name in sorted({*started, *(self._expected_at_begin & (+self._expected).keys())}):
            if name not in started:
                problem = _NEVER_RAN
            elif not committed[name]:
                problem = _NEVER_COMMITTED.format(started[name])
            elif not tensors[name]:
                largest = (eligibility.largest_small or {}).get(name)
                advice = _NONE_AT_ALL
                if largest is not None:
                    advice = _LARGEST.format(tuple(largest), largest.numel())
                problem = _NO_TENSOR.format(committed[name], smallest_numel)
                problem += eligibility.elsewhere_advice() or advice
            else:
                continue
            # If a checkpoint is around the group, its warning has given the reason.
            if name not in self._warned and not was_warned_of(f"group '{name}'"):
                self._warned.add(name)
                logger.warning("group '%s' %s", name, problem)
