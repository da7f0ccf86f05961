"""Writes docs/options.md from the docstring of :class:`pp_offload.OffloadConfig`.

    python docs/options.py

The source is parsed, not imported, so this needs nothing but Python. A test holds the page to what
is written here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent / "pp_offload" / "config.py"
TARGET = HERE / "options.md"

HEAD = """\
<!-- Written by docs/options.py from the docstring of OffloadConfig. Change it there. -->

# Options

`OffloadConfig` is a frozen record of keyword arguments. It is checked as a whole: one
[`ConfigError`](errors.md#configerror) lists every violation, names that are no option among them.

| what takes it | how |
|---|---|
| a schedule | `attach(schedule, groups, OffloadConfig(...))` |
| groups without a schedule | `configure(OffloadConfig(...))`, between steps |
| `OffloadActivations` and the functions that make one | `config=OffloadConfig(...)` |
| the parameters of a checkpoint variant; `OffloadModel` | `config=OffloadConfig(...)` |

Options may come from elsewhere. There bytes may have a unit (`"8GiB"`, `"512MB"`).

| from | how |
|---|---|
| JSON, YAML | `OffloadConfig.from_dict(options)`; `config.to_dict()` is the way back |
| TOML | `OffloadConfig.from_dict(tomllib.load(file)["offload"])` for the table `[offload]` |
| variables | `OffloadConfig.from_env()`, for `PP_OFFLOAD_HOST_BUDGET_BYTES=64GiB` and the others |
"""


@dataclass(frozen=True)
class Option:
    """One field of the record."""

    name: str
    kind: str
    """Annotation of the field."""

    default: str
    """Default, as Python writes it."""

    meaning: str
    """What the docstring of the class says of it, as Markdown."""


def options(source: str) -> Iterator[Option]:
    """The fields of ``OffloadConfig``, in order."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    record = next(node for node in classes if node.name == "OffloadConfig")
    arguments = ast.get_docstring(record).split("\nArgs:\n")[1].split("\nRaises:\n")[0]
    names_and_texts = re.split(r"^    (\w+): ", arguments, flags=re.MULTILINE)[1:]
    texts = dict(zip(names_and_texts[::2], names_and_texts[1::2], strict=True))
    for field in record.body:
        if isinstance(field, ast.AnnAssign) and field.value is not None:
            name = ast.unparse(field.target)
            if name not in texts:
                raise ValueError(f"{name} is not in the docstring of OffloadConfig; add it")
            annotation, default = ast.unparse(field.annotation), ast.unparse(field.value)
            yield Option(name, annotation, default, markdown(texts[name]))


def markdown(docstring: str) -> str:
    """Each paragraph in one line, and its code as Markdown has it."""
    paragraphs = re.split(r"\n\s*\n", cleandoc(docstring))
    return "\n\n".join(" ".join(text.split()) for text in paragraphs).replace("``", "`")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for option in options(SOURCE.read_text()):
        default = option.default.replace("'", '"')
        kind = f"`{option.kind}`, default `{default}`"
        parts.append(f"## {option.name}\n\n{kind}\n\n{option.meaning}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET}", file=sys.stderr)
