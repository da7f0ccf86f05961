"""Notes what was lent to owners, and finds what was lent to those that are gone.

An owner gives nothing back: a loan ends when nobody refers to its owner any more. No Python code
may run at that moment, since autograd may be freeing a node, and what a signal handler raises there
is only printed. So the loan is a weak reference whose callback is the ``append`` of a queue, which
is C; the next call looks at the queue. :class:`Loans` holds the references, for the callback of one
that went with its owner would not be called.

    loans = Loans[HostBuffer]()
    loans.add(owner, buffer)
    for buffer in loans.ended():   # whose owners are gone
        ...
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Generic, TypeVar

Lent = TypeVar("Lent")


class _Loan(weakref.ref[Any]):
    """An owner, and what it has."""

    __slots__ = ("lent",)

    # By identity: an owner that is gone has no hash.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    lent: Any


class Loans(Generic[Lent]):
    """Who has what. Owners may go on any thread; the rest is for one thread at a time."""

    def __init__(self) -> None:
        self._current: set[_Loan] = set()
        self._ended: deque[_Loan] = deque()

    def add(self, owner: object, lent: Lent) -> None:
        """``lent`` is taken for as long as anybody refers to ``owner``."""
        loan = _Loan(owner, self._ended.append)
        loan.lent = lent
        self._current.add(loan)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`ended` gives anything."""
        return bool(self._ended)

    def ended(self, most: int | None = None) -> list[Lent]:
        """What was lent to owners that are gone; each once, and no more than ``most`` of them."""
        num = len(self._ended) if most is None else min(most, len(self._ended))
        ended = [self._ended.popleft() for _ in range(num)]
        found = [one.lent for one in ended if one in self._current]  # or :meth:`audit` left it out
        self._current.difference_update(ended)
        return found

    def audit(self) -> list[Lent]:
        """What is lent to living owners. :meth:`ended` will not give what the others had."""
        self._current = {one for one in self._current if one() is not None}
        return [loan.lent for loan in self._current]
