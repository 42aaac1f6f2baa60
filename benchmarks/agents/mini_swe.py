import os

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/m",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]},
    cost_tracking="ignore_errors",
)
agent = DefaultAgent(
    model,
    LocalEnvironment(),
    system_template="You are an agent.",
    instance_template="{{task}}",
    step_limit=4,
)
agent.run("Say hello.")
