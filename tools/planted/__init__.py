"""Faults that the core tests have to catch: ``python tools/planted`` plants one after another."""
