"""Sphinx settings: ``sphinx-build -W -b html docs docs/_build``."""

project = "pp_offload"
author = "the pp_offload authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_inherit_docstrings = False
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "alabaster"
html_theme_options = {"page_width": "1020px"}
