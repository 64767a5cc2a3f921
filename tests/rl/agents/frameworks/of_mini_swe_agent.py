"""`mini-swe-agent`, as it is: a shell, and a model by litellm."""

import json
import os

os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["MSWEA_SILENT_STARTUP"] = "1"
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

task = json.loads(os.environ["TREEWISE_TASK"])
agent = DefaultAgent(
    LitellmModel(model_name="openai/policy"),
    LocalEnvironment(),
    system_template="You use a shell.",
    instance_template="{{task}}",
    step_limit=5,
)
print(agent.run(task["question"]))
print(1.0)
