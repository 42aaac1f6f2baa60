"""A page with everything that `import unirl` gives, from signatures and docstrings."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File

import unirl


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, "reference/python.md", content=python_page()))
    return files


def exported() -> dict[str, list[str]]:
    """Public names of `unirl` by the module that they are defined in."""
    by_module: dict[str, list[str]] = {}
    for name in dir(unirl):
        home = getattr(getattr(unirl, name), "__module__", None)
        if not name.startswith("_") and home is not None and home.split(".")[0] == "unirl":
            by_module.setdefault(home, []).append(name)
    return by_module


def python_page() -> str:
    lines = [
        "# Python",
        "",
        "What `import unirl` gives: `unirl.run`, `unirl.Plan` and so on. All else may move before",
        "1.0.",
        "",
    ]
    by_module = exported()
    for module in sorted(by_module, key=lambda name: (name.count("."), name)):
        lines += [f"## {module}", ""]
        for name in by_module[module]:
            lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)
