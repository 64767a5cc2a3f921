"""An agent of the OpenAI Agents SDK learns, on two CPU cores, in some five minutes: SmolLM2-135M looks for things.

    make agent-demo
    python examples/agent_demo.py --python .venv-agents/bin/python [--seed 1] [--kind environment] [--resume]

The agent (box_agent.py) has two tools, one that says whose box has which number and one that looks into a box. First a
minute of fine-tuning on recorded tries: the agent's own calls, as the endpoint recorded them while a script spoke in
place of the model, and three turns of ten were a bad habit. Then `treewise rl --agent`, whose reward is 1 for
the right word. `--kind environment` trains the same agent rewritten as an environment (box_environment.py), from the
same weights on the same tasks.

Every figure that is printed is of the run itself. docs/agents.md explains what happens.
"""

import argparse
import json
import random
import resource
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from treewise.cli.main import explained, loading
from treewise.cli.main import main as treewise

with loading("agent-demo"):
    import numpy as np
    import torch
    from online_rl import free_folder, show_bars
    from transformers import PrinterCallback, ProgressCallback
    from transformers.utils import logging

    import treewise as tw
    from treewise.cli.progress import StepLines
    from treewise.errors import duration
    from treewise.models.load_model import load_model
    from treewise.rl.agents.collecting import AgentCollector
    from treewise.rl.agents.settings import AgentSettings
    from treewise.rl.online.collector import GroupRequest, Moment
    from treewise.rl.online.journal import Journal, LoopState
    from treewise.rl.samplers import Completion, SampleRequest
    from treewise.rl.success_book import BookSettings, SuccessBook
    from treewise.rl.tasks.agent_task import AgentTask

HERE = Path(__file__).parent
PEOPLE = ("Anna", "Ben", "Carl", "Dora", "Emma", "Fred", "Gina", "Hans", "Ida", "Jack")
THINGS = ("ball", "book", "bread", "coin", "cup", "fish", "hat", "key", "lamp", "map", "pen", "ring", "shoe", "stone")
NUM_TASKS, NUM_BOXES, HELD_OUT = 480, 6, 0.1
NUM_RECORDED, NUM_TRIES = 48, 4  # further tasks, of the recorded tries
SLIP, WRONG = 0.3, ("Anna", "7", "nothing")  # how often a recorded turn is wrong, and its person, box or answer then
WARM_UP_TREES = 6  # of a step
MAX_NEW_TOKENS, TOKENS_PER_EPISODE = 48, 60  # of a turn at most; about
# What a policy of 135 million parameters needs to see: a tool a line, calls as Hermes and Qwen models write them.
TEMPLATE = """
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.role == 'system' %}{% for tool in tools or [] -%}
{%- set own = tool.function -%}
{{ '\\n' + own.name + '(' + own.parameters.properties | join(', ') + '): ' + own.description }}
{%- endfor %}{% endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set own = call.function -%}
{%- set given = own.arguments if own.arguments is string else own.arguments | tojson -%}
{{ '<tool_call>{"name": "' + own.name + '", "arguments": ' + given + '}</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


# -- tasks, and recorded tries -----------------------------------------------------------------------------------------


def tasks_of(name: str, count: int) -> list[dict[str, Any]]:
    """Rows: whose box has which number, what lies in it, and a question. name: other rows for each."""
    rows = []
    for number in range(count):
        draw = random.Random(f"{name}/{number}")
        people = draw.sample(PEOPLE, NUM_BOXES)
        boxes = dict(zip(people, map(str, draw.sample(range(10, 100), NUM_BOXES)), strict=True))
        things = dict(zip(boxes.values(), draw.sample(THINGS, NUM_BOXES), strict=True))
        person = draw.choice(people)
        question = f"What is in {person}'s box?"
        rows.append({"question": question, "boxes": boxes, "things": things, "answer": things[boxes[person]]})
    return rows


class Script:
    """A sampler that does the right thing, but for bad habits."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """A turn behind each prefix."""
        return [(self._turn(each),) for each in requests]

    def update(self, model: object) -> None:
        """It has no weights."""

    def close(self) -> None:
        """Nothing to close."""

    def draw_of(self, request: SampleRequest) -> random.Random:
        """What decides whether a turn is a bad habit."""
        return random.Random(request.seed)

    def _turn(self, request: SampleRequest) -> Completion:
        draw = self.draw_of(request)
        talk = self.tokenizer.decode(list(request.prefix_ids))
        said = [each.removesuffix("<|im_end|>\n").partition("\n") for each in talk.split("<|im_start|>")]
        results = [text for role, _, text in said if role == "tool"]
        person = said[2][2].split()[3].removesuffix("'s")
        word = WRONG[len(results)] if draw.random() < SLIP else [person, *results][len(results)]
        text = turn_of(len(results), word)
        ids = [*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id]
        return Completion(np.array(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.float32), "stop")


def turn_of(number: int, word: str) -> str:
    """The first turn asks for a person's box, the second looks into one, the third answers."""
    if number == 2:
        return word
    name, argument = (("box_of", "person"), ("look_in", "box"))[number]
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {argument: word}})}</tool_call>"


def recorded_tries(tokenizer: Any, model: Any, python: str | None) -> list[list[tw.Trajectory]]:
    """What the endpoint records of the agent while the script speaks: a tree of each task, whose turns are trained."""
    task = AgentTask(tasks_of("recorded", NUM_RECORDED), held_out=0.0, name="recorded")
    online = tw.OnlineSettings(max_new_tokens=MAX_NEW_TOKENS, chat_template=TEMPLATE)
    own = AgentSettings(episodes=NUM_TRIES, python=python)
    collector = AgentCollector(AGENT, tokenizer, model, task, online, own)
    try:
        items = [task.item("train", index) for index in range(NUM_RECORDED)]
        asked = [GroupRequest(n, item, item.key, 1, (n,)) for n, item in enumerate(items)]
        state = LoopState(SuccessBook(BookSettings()))
        found = collector.collect(asked, Moment("recorded", state, Journal(None), Script(tokenizer), 0))
    finally:
        collector.close()
    right = np.mean([reward for group in found.groups for reward in group.known_rewards])
    print(f"recorded: {NUM_TRIES} tries of each of {NUM_RECORDED} tasks, of which {right:.0%} are right")
    return [[tw.Trajectory(row.token_ids, row.loss_weights) for row in group.rows] for group in found.groups]


def warm_up(name: str, output: Path, python: str | None) -> None:
    """Fine-tuning on the recorded tries; the model is saved in `output`."""
    model, tokenizer = load_model(name)
    trees = recorded_tries(tokenizer, model, python)
    part = output.with_name(output.name + ".part")
    args = tw.TreeTrainingArguments(
        output_dir=str(part),
        per_device_train_batch_size=WARM_UP_TREES,
        num_train_epochs=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_tokens=2048,
        save_strategy="no",
        report_to="none",
    )
    part.mkdir(parents=True, exist_ok=True)
    trainer = tw.TreeTrainer(model, args, train_dataset=trees, processing_class=tokenizer, callbacks=[StepLines(part)])
    for printer in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printer)
    trainer.train()
    trainer.save_model()
    part.rename(output)  # whole, or not there


# -- the run -----------------------------------------------------------------------------------------------------------


def words_of(args: argparse.Namespace, output: Path) -> list[str]:
    """The command of the run."""
    rows = str(output / "tasks.jsonl")
    own: dict[str, object] = {
        "model": args.start or output / "warm-up",
        "chat_template": output / "template.jinja",
        "output_dir": output / "run",
        "iterations": args.iterations,
        "trees_per_iteration": args.tasks,
        "learning_rate": args.learning_rate,
        "max_tokens": 2048,
        "drop_flat_groups": "true",
        "eval_every": args.eval_every,
        "eval_items": int(NUM_TASKS * HELD_OUT),
        "eval_temperature": 1,
        "show_every": args.eval_every,
        "save_every": args.iterations,
        "seed": args.seed,
        "report_to": "none",
        "use_cpu": "true",
        "tasks_settings.held_out": HELD_OUT,
    }
    if args.kind == "agent":
        settings = {"episodes": args.episodes, "episode_seconds": 3600, "python": args.python}
        own |= {"agent": AGENT, "tasks": rows, "max_new_tokens": MAX_NEW_TOKENS, "gather_seconds": 2}
        own |= {f"agent_settings.{name}": value for name, value in settings.items() if value is not None}
    else:
        own |= {"tasks": f"{HERE / 'box_environment.py'}:boxes", "tasks_settings.rows": rows}
        own |= {"max_new_tokens": 4 * MAX_NEW_TOKENS, "gather_seconds": "null"}  # of all turns of an episode
        own |= {"branching_settings.roots": args.episodes}
        own |= {"tokens_per_iteration": args.tasks * args.episodes * TOKENS_PER_EPISODE}
    words = ["rl"]
    for name, value in own.items():
        words += [f"--{name}", str(value)]
    return words


AGENT = f"{HERE / 'box_agent.py'}:run"


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description="An agent of the OpenAI Agents SDK learns: tools, then online RL.")
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--output", type=Path, help="folder of the run (runs/agent-demo, or runs/agent-demo-2, ...)")
    parser.add_argument("--python", help="a Python with openai-agents; without it this one")
    parser.add_argument("--kind", choices=("agent", "environment"), default="agent")
    parser.add_argument("--start", type=Path, help="the folder of a model that has warmed up")
    parser.add_argument("--warm_up_alone", action="store_true", help="ends when the model has warmed up")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=6, help="of an iteration")
    parser.add_argument("--episodes", type=int, default=6, help="of a task")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--eval_every", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="goes on with the run in the folder")
    parser.add_argument("--record", type=Path, help="a JSON file for the figures")
    return parser


def main() -> int:
    return explained("agent-demo", partial(run, parser().parse_args()))


def run(args: argparse.Namespace) -> int:
    logging.disable_progress_bar()
    started = time.perf_counter()
    output = args.output or free_folder(Path("runs/agent-demo"), is_resumed=args.resume)
    print(f"an agent with two tools, on {torch.get_num_threads()} threads, in {output}")
    output.mkdir(parents=True, exist_ok=True)
    (output / "template.jinja").write_text(TEMPLATE.strip())
    rows = tasks_of(f"practice {args.seed}", NUM_TASKS)
    (output / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.start is None and not (output / "warm-up").is_dir():
        warm_up(args.model, output / "warm-up", args.python)
    if args.warm_up_alone:
        return 0
    seconds_warm_up, began, cpu = time.perf_counter() - started, time.perf_counter(), cpu_seconds()
    words = words_of(args, output)
    print("\n$ " + shlex.join(["treewise", *words]) + "\n", flush=True)
    code = treewise([*words, *["--resume"] * args.resume])
    if code:
        return code
    result = {
        "seed": args.seed,
        "kind": args.kind,
        **figures(output / "run"),
        "seconds_warm_up": seconds_warm_up,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": cpu_seconds() - cpu,
    }
    if args.record:
        args.record.write_text(json.dumps(result))
        return 0
    page, rollouts = output / "report.html", output / "run" / "rollouts" / f"iteration-{args.iterations:05d}.jsonl"
    model = str(args.start or output / "warm-up")
    treewise(["inspect", str(rollouts), "--tokenizer", model, "--run", str(output / "run"), "--html", str(page)])
    show(result, output / "run", page)
    return 0


def cpu_seconds() -> float:
    """Of this process, and of those that it started and that have ended: agents are such."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


# -- what came of it ---------------------------------------------------------------------------------------------------


def figures(run: Path) -> dict[str, Any]:
    """Held-out success by iteration, and over seconds since the first update began; what the episodes were."""
    logs = json.loads((run / "trainer_state.json").read_text())["log_history"]
    held_out = {int(log["iteration"]): log["eval_pass@1"] for log in logs if "eval_pass@1" in log}
    own = [log for log in logs if "sampled_tokens" in log]
    names = ("success", "share_ratio", "seconds_iteration", "seconds_sampling", "seconds_update", "sampled_tokens")
    return {
        "held_out_success": held_out,
        **{name: [log.get(name) for log in own] for name in names},
        **{name: sum(log.get(name, 0) for log in own) for name in ("agent_calls", "agent_forks", "failed_rollouts")},
    }


def show(result: dict[str, Any], run: Path, page: Path) -> None:
    """Success of each iteration as bars, and where everything lies."""
    held_out = result["held_out_success"]
    show_bars(result["success"], held_out, "tasks")
    if held_out:
        first, last = held_out[min(held_out)], held_out[max(held_out)]
        print(f"\nheld-out success {first:.3f} after the warm-up, {last:.3f} after RL")
    print(
        f"{sum(result['sampled_tokens']):,.0f} tokens sampled and trained in {result['agent_calls']:,.0f} calls, "
        f"{result['agent_forks']:,.0f} of which changed what stood before\n"
        f"{duration(result['seconds_warm_up'])} of warm-up, {duration(result['seconds'])} of RL, in which "
        f"{result['cpu_seconds']:.0f} seconds of CPU, the agents' included\n"
        f"the page, with each call and its text: {page}\n"
        f"every rollout: {run}/rollouts\n"
        "\nnow yours:\n"
        "  treewise rl --agent my_agent.py:run --tasks tasks.jsonl --model MODEL --output_dir runs/mine\n"
        "  treewise inspect --run runs/mine --html mine.html"
    )


if __name__ == "__main__":
    sys.exit(main())
