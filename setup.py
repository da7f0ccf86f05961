"""Everything is in pyproject.toml; for who calls this file."""

from setuptools import setup

setup()
