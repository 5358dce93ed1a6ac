"""Write what the code itself says as documentation.

- docs/settings.md: the settings' names, types, defaults and the docstrings beside them;
- docs/rules.md: the rules that a synth checks;
- docs/strategies.md: which settings go together, and which test shows it.

Run by `make docs`; ``--check`` writes nothing and fails when a file is out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

SETTINGS_INTRODUCTION = """# Settings

Made by `make docs` from the code. Settings of the stacks are read from `cluster.yaml` (another file by
`-c settings=FILE`) and each can be overridden by `-c name=value`, a nested one by `-c training.steps=500`.
An unknown or ill-typed one is an error that names the nearest.
"""


RULES_INTRODUCTION = """# Rules

Made by `make docs` from the code. A synth checks every rule and reports all findings together. An error stops it. A warning
is shown, and silenced for a construct and all in it by the rule's name and a reason:

```python
from traincluster import acknowledge

acknowledge(cluster, "image-is-pinned", "A new image at each deploy is what we want.")
```

A rule that depends on something which only the deployment knows finds nothing. `traincluster rules` lists the rules too.
"""


def main() -> int:
    sys.path.insert(0, str(ROOT))  # for stacks, which is not installed
    from tools.strategies_page import strategies_page

    pages = {"settings.md": settings_page(), "rules.md": rules_page(), "strategies.md": strategies_page()}
    if "--check" not in sys.argv[1:]:
        for name, text in pages.items():
            (DOCS / name).write_text(text)
        return 0
    stale = [name for name, text in pages.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != text]
    for name in stale:
        print(f"docs/{name} is not what the code says. Run: make docs", file=sys.stderr)
    return 1 if stale else 0


def settings_page() -> str:
    from stacks.settings import Settings
    from trainrun.settings import TrainSettings

    parts = [SETTINGS_INTRODUCTION, section("The stacks", Settings, prefix="")]
    parts.append(section("Training (`training:` in cluster.yaml, or a script's own file)", TrainSettings, prefix=""))
    return "\n".join(parts)


def rules_page() -> str:
    from traincluster.rules import MODULES, rules

    parts = [RULES_INTRODUCTION]
    for module in MODULES:
        title = (inspect.getdoc(module) or "").splitlines()[0].rstrip(".")
        own = [rule for rule in rules() if rule.check.__module__ == module.__name__]
        rows = [f"| `{rule.name}` | {', '.join(rule.levels)} | {cell(rule.summary)} | {cell(rule.source)} |" for rule in own]
        parts.append(
            "\n".join([f"## {title}", "", "| rule | levels | what it checks | source |", "|---|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def section(title: str, cls: type, *, prefix: str) -> str:
    lines = [f"## {title}", "", summary(cls), "", "| setting | type | default | meaning |", "|---|---|---|---|"]
    nested = []
    hints = typing.get_type_hints(cls)
    meanings = field_docstrings(cls)
    for field in dataclasses.fields(cls):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            nested.append(section(f"`{name}`", hint, prefix=f"{name}."))
            continue
        meaning = cell(meanings.get(field.name, ""))
        lines.append(f"| `{name}` | {type_name(hint)} | {default_of(field)} | {meaning} |")
    return "\n".join([*lines, "", *nested])


def summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def field_docstrings(cls: type) -> dict[str, str]:
    """The string that follows each field in the class body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            continue
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    simple = {int: "whole number", float: "number", str: "text", bool: "true, false"}
    return simple.get(hint, str(hint).replace("typing.", "").replace("|", "or"))


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`" if field.default is not None else "none"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


if __name__ == "__main__":
    sys.exit(main())
