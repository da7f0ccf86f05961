"""Write docs/options.md from the docstring of :class:`pp_offload.OffloadConfig`.

    python docs/options.py

A test compares the page with the docstring.
"""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import cleandoc
from pathlib import Path

from pp_offload import OffloadConfig

HEAD = """\
<!-- Written by docs/options.py from the docstring of OffloadConfig. Change it there. -->

# Options

`OffloadConfig` is a frozen record of keyword arguments. One [`ConfigError`](errors.md#configerror)
lists every violation.

A schedule takes it by `attach(schedule, groups, OffloadConfig(...))`, groups without a schedule by
`configure(OffloadConfig(...))` between steps, all else as `config=OffloadConfig(...)`.

`OffloadConfig.from_dict(options)` takes what JSON, YAML or TOML gave, and `config.to_dict()` is the
way back. `OffloadConfig.from_env()` reads `PP_OFFLOAD_HOST_BUDGET_BYTES=64GiB` and the others.
There bytes may have a unit (`"8GiB"`, `"512MB"`).
"""


def page() -> str:
    """Make the page: the type and the text of each option, a paragraph in a line."""
    doc = cleandoc(OffloadConfig.__doc__ or "")
    arguments = doc.split("\nArgs:\n")[1].split("\nRaises:\n")[0]
    _, *parts = re.split(r"^    (\w+): ", arguments, flags=re.MULTILINE)
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    sections = [HEAD]
    for each in fields(OffloadConfig):
        paragraphs = re.split(r"\n\s*\n", texts[each.name])
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph)
        text = text.replace("``", "`").replace(":func:", "")
        sections.append(f"## {each.name}\n\n`{each.type}`\n\n{text}\n")
    return "\n".join(sections)


if __name__ == "__main__":
    Path(__file__).with_name("options.md").write_text(page())
