# mypy: ignore-errors
"""A taskset of verifiers whose tasks bring servers of tools."""

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class ToolTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return []


class ToolTaskset(vf.Taskset[ToolTask]):
    def load(self):
        yield ToolTask(vf.TaskData(prompt="What is 1 + 1?"))
