"""Planted faults, and whether the tests see them: ``python tools/mutants --help``."""

from __future__ import annotations

import sys

from faults import MUTANTS
from field_faults import FIELD_MUTANTS
from runner import main

if __name__ == "__main__":
    sys.exit(main([*MUTANTS, *FIELD_MUTANTS]))
