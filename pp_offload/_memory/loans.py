"""What was handed out and is still referred to.

An owner gives nothing back: it is noticed that nobody refers to it any more. No Python code runs at
that moment, since it comes where autograd frees a node, and what a signal handler raises there is
only printed. A weak reference files itself, by a C function; it is looked at in the next call. The
loans hold that reference, for one that went with its owner would file nothing.

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

    lent: Any


class Loans(Generic[Lent]):
    """Who has what. Owners may go on any thread; the rest is for one thread at a time."""

    def __init__(self) -> None:
        self._current: dict[int, _Loan] = {}
        self._ended: deque[_Loan] = deque()

    def add(self, owner: object, lent: Lent) -> None:
        """``lent`` is taken for as long as anybody refers to ``owner``."""
        loan = _Loan(owner, self._ended.append)
        loan.lent = lent
        self._current[id(loan)] = loan

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`ended` gives anything."""
        return bool(self._ended)

    def ended(self) -> list[Lent]:
        """What was lent to owners that are gone; each once."""
        found = []
        while self._ended:
            loan = self._ended.popleft()
            if self._current.pop(id(loan), None) is not None:  # or :meth:`audit` left it out
                found.append(loan.lent)
        return found

    def audit(self) -> list[Lent]:
        """What is lent to owners that are there; :meth:`ended` will not give the rest any more."""
        self._current = {key: one for key, one in self._current.items() if one() is not None}
        return [loan.lent for loan in self._current.values()]
