"""A page with every command of `unirl`, as the command line itself describes it."""

from __future__ import annotations

from typing import Any

from config_reference import escaped
from mkdocs.structure.files import File

from unirl.cli import COMMANDS
from unirl.config import fields_help, flag_of


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    return files


def commands_page() -> str:
    lines = [
        "# Command line",
        "",
        "`unirl --help` lists the commands, `unirl COMMAND --help` explains one. `train`, `bench`",
        "and `tune` also take every key of the recipe's config as a flag ([settings](index.md));",
        "`resume` and `eval` take those that may change. An error has three lines (what, the rule,",
        "the remedy) and exit code 2; a fault of UniRL itself has exit code 1 and leaves its trace",
        "in a file. `--debug` shows it.",
        "",
    ]
    for name, command in COMMANDS.items():
        lines += [f"## unirl {name}", "", "```text", f"unirl {name} {command.usage}", "```", ""]
        lines += [escaped(command.summary), ""]
        items = fields_help(command.options)
        if items:
            lines += ["| flag | kind | default | |", "| --- | --- | --- | --- |"]
        for item in items:
            kind, doc = escaped(item.kind), escaped(" ".join(item.doc.split()))
            default = f"`{item.default}`" if item.default else "required"
            lines.append(f"| `{flag_of(item.key)}`{{ .flag }} | {kind} | {default} | {doc} |")
        lines.append("")
    return "\n".join(lines)
