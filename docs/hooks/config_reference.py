"""A page for each recipe with every key of its config: kind, default and docstring."""

from __future__ import annotations

import inspect
import re
from typing import Any

from mkdocs.structure.files import File

from unirl import registry
from unirl.config import FieldHelp, fields_help
from unirl.config.shipped import shipped_configs


def on_files(files: Any, config: Any) -> Any:
    for recipe in registry.RECIPES:
        name = f"reference/config/{recipe}.md"
        files.append(File.generated(config, name, content=recipe_page(recipe)))
    files.append(File.generated(config, "reference/configs.md", content=configs_page()))
    return files


def recipe_page(recipe: str) -> str:
    module = registry.recipe(recipe)
    items = fields_help(module.Config)
    lines = [
        f"# Settings of `{recipe}`",
        "",
        inspect.cleandoc(module.__doc__ or ""),
        "",
        f"{len(items)} keys. Each is a key of a config file and a flag: `queue.max_staleness = 2`",
        "is `--queue.max-staleness 2`. The defaults are those of the classes; what `unirl train`",
        "sets by the environment's kind where nothing is given, it prints (`--dry-run` shows it).",
        f"Keys marked *common* are in `unirl train {recipe} --help`.",
        "",
    ]
    table = None
    for item in items:
        if item.key.rpartition(".")[0] != table:
            table = item.key.rpartition(".")[0]
            lines += [f"## {table or 'top level'}", ""]
        lines += key_lines(item)
    return "\n".join(lines)


def key_lines(item: FieldHelp) -> list[str]:
    """A heading of its own, so that the search finds the key."""
    default = f"default `{item.default}`" if item.default else "required"
    parts = [escaped(item.kind), default, *(["*common*"] if item.is_common else [])]
    return [f"#### `{item.key}` {{ #{item.key} }}", "", ", ".join(parts), "", escaped(item.doc), ""]


def escaped(text: str) -> str:
    """Plain text as Markdown; what is in backquotes stays."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*_\[\]#|])", r"\\\1", parts[i]).replace("<", "&lt;")
    return "".join(parts)


def configs_page() -> str:
    lines = [
        "# Shipped configs",
        "",
        "`unirl train @NAME` trains one; flags change it. `unirl list configs` lists them.",
        "",
    ]
    for name, path in shipped_configs().items():
        lines += [f"## @{name}", "", "```toml", path.read_text(encoding="utf-8"), "```", ""]
    return "\n".join(lines)
