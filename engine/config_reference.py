"""`python -m engine.config_reference`: docs/engine-configuration.md, from the fields of ContinuousBatchingConfig."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields

from engine.config import OMITTED, ContinuousBatchingConfig

HEAD = """\
# Engine configuration

`engine.config.ContinuousBatchingConfig`, field by field. Names and defaults are those of transformers' class of the
same name where it has the field; *(ours)* marks the others. Values that cannot work raise ValueError at construction.
On a command line, `--help` lists the options and their defaults; prefill nodes use `prefill_first` unless told
otherwise.

This page is written by `python -m engine.config_reference`.
"""
OMITTED_HEAD = """
## Fields of transformers' class that are not here

"""


def reference() -> str:
    """The page's text."""
    documented = dict(_documented_fields())
    lines = [HEAD, "| field | default | meaning |", "|---|---|---|"]
    for field in fields(ContinuousBatchingConfig):
        default = repr(field.default).replace("'", '"')
        lines.append(f"| `{field.name}` | `{default}` | {documented[field.name]} |")
    omitted = [f"- `{name}`: {reason}" for name, reason in sorted(OMITTED.items())]
    return "\n".join(lines) + "\n" + OMITTED_HEAD + "\n".join(omitted) + "\n"


def _documented_fields() -> Iterator[tuple[str, str]]:
    """Each field's name and the text below it. Raises ValueError for a field without one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(ContinuousBatchingConfig)))
    class_ = tree.body[0]
    assert isinstance(class_, ast.ClassDef)
    for statement, below in zip(class_.body, class_.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            raise ValueError(f"{statement.target.id} has no text")
        yield statement.target.id, " ".join(str(below.value.value).split()).replace("(ours)", "*(ours)*")


if __name__ == "__main__":
    sys.stdout.write(reference())
