# mypy: ignore-errors
"""A taskset of verifiers: sums, with a reward for the answer and one for being brief."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace) -> float:
        if trace.last_reply == "boom":
            raise RuntimeError("boom")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) <= 2)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumsTaskset(vf.Taskset[SumTask]):
    def load(self):
        for i in range(20):
            prompt = f"What is {i} + 1?"
            yield SumTask(SumData(prompt=prompt, system_prompt="Count.", answer=str(i + 1)))
