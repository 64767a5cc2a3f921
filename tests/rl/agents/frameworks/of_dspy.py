"""`dspy`: a module that reasons and acts, and one that predicts."""

import json
import os

import dspy


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


dspy.configure(lm=dspy.LM("openai/policy", cache=False))
task = json.loads(os.environ["TREEWISE_TASK"])
print(dspy.Predict("question -> answer")(question=task["question"]))
try:
    print(dspy.ReAct("question -> answer", tools=[add], max_iters=2)(question=task["question"]))
except Exception as error:  # a policy that does not write the form
    print(error)
print(1.0)
