"""Pictures of the pages that treewise writes and serves, as a browser shows them: `make pictures`.

    python docs/figures/screens.py CHROMIUM [RUN]

RUN is the folder of a run of `make rl`, which is made first where none is given (minutes). Needs the playwright package
and smollm2-demo. The data are those of examples/data, and what SmolLM2 answers to the agent below.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import tinker
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from treewise.cli.main import main

FOLDER, EXAMPLES = Path(__file__).parent, Path(__file__).parents[2] / "examples"
MODEL, PORT = "smollm2-demo", 8037
DATA = [str(EXAMPLES / "data" / "tau_airline.jsonl.gz"), "--model", MODEL, "--chat_template", "chatml"]
WIDTH, HEIGHT, COLOURS, EDGE = 1000, 1000, 64, 20
CALLS = "details.episode:first-of-type details"  # of the first episode: shown open

# Two calls, the second behind the first; run by `treewise rl --agent`, and alone against `treewise record`.
AGENT = """
import json, os, urllib.request

def ask(messages):
    body = {"model": "policy", "max_tokens": 24, "messages": messages}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def run(task):
    messages = [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": task["question"]}]
    first = ask(messages)
    ask([*messages, first, {"role": "user", "content": "Are you sure?"}])
    return float(task["answer"].lower() in (first["content"] or "").lower())
"""
QUESTIONS = {
    "Which city is the capital of France?": "Paris",
    "What colour is snow?": "white",
    "Which animal barks?": "dog",
    "What is frozen water called?": "ice",
}


class Picture(NamedTuple):
    """A page, and what of it is shown: an element, or what stands in so many pixels from its top on."""

    address: str
    part: str
    height: int | None = None


def treewise(*words: str) -> None:
    """A command, which has to succeed."""
    if main(list(words)):
        raise SystemExit(f"treewise {words[0]} failed; what it said stands above")


def of_inspect(folder: Path) -> dict[str, Picture]:
    """A log: the bill and a tree."""
    treewise("inspect", *DATA, "--card", "h100", "--dollars_per_hour", "2.50", "--html", str(folder / "report.html"))
    report = (folder / "report.html").as_uri()
    return {"report": Picture(report, "#bill"), "trees": Picture(report, "#trees")}


def of_runs(folder: Path, run: Path) -> dict[str, Picture]:
    """An online run, and what an agent called in another."""
    if not run.exists():
        subprocess.run([sys.executable, str(EXAMPLES / "online_rl.py"), "--output", str(run)], check=True)
    treewise("inspect", "--run", str(run), "--html", str(folder / "run.html"))
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS.items()))
    sizes = {"iterations": 1, "trees_per_iteration": 2, "max_new_tokens": 24}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    flags += ["--agent_settings.episodes", "4", "--output_dir", str(folder / "agent"), "--model", MODEL]
    treewise("rl", "--agent", f"{agent}:run", "--tasks", str(tasks), *flags)
    treewise("inspect", "--run", str(folder / "agent"), "--html", str(folder / "calls.html"))
    return {
        "run": Picture((folder / "run.html").as_uri(), "#run", height=760),
        "calls": Picture((folder / "calls.html").as_uri(), "#calls", height=640),
    }


def of_record(folder: Path) -> dict[str, Picture]:
    """What an agent of its own was recorded to do."""
    rows = folder / "recorded.jsonl"
    agent: dict[str, object] = {}
    exec(AGENT, agent)
    with serving("record", "--output", str(rows)) as address:
        question, answer = next(iter(QUESTIONS.items()))
        for number in range(6):
            key = posted(f"{address}/v1/episodes", {"name": f"try-{number}", "group": question})["key"]
            os.environ |= {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": key}
            reward = agent["run"]({"question": question, "answer": answer})  # type: ignore[operator]
            posted(f"{address}/v1/episodes/end", {"reward": reward}, key)
    treewise("inspect", str(rows), "--model", MODEL, "--html", str(folder / "record.html"))
    return {"record": Picture((folder / "record.html").as_uri(), "#trees")}


def posted(address: str, body: object, key: str = "none") -> dict[str, str]:
    """The answer to a request of the endpoint."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)) as answer:
        found: dict[str, str] = json.load(answer)
    return found


@contextmanager
def serving(command: str, *flags: str) -> Iterator[str]:
    """A server of ours in a process of its own; its address."""
    words = [sys.executable, "-m", "treewise", command, "--model", MODEL, "--port", str(PORT), *flags]
    process = subprocess.Popen(words)
    address = f"http://127.0.0.1:{PORT}"
    try:
        while True:
            try:
                urllib.request.urlopen(address).close()
            except urllib.error.HTTPError:
                break
            except OSError:
                assert process.poll() is None, "the server ended; what it said stands above"
                time.sleep(0.5)
            else:
                break
        yield address
    finally:
        process.terminate()
        process.wait()


def train_by_tinker(address: str) -> None:
    """Some steps of a client: answers to one question, and a sample."""
    service = tinker.ServiceClient(base_url=address, api_key="tml-local")
    client = service.create_lora_training_client(base_model=MODEL, rank=8).result()
    tokenizer = client.get_tokenizer()
    ask = tokenizer("Question: which city is the capital of France? Answer:").input_ids
    batch = []
    for answer in (" Paris.", " Paris, on the Seine.", " It is Paris."):
        ids, reply = ask + tokenizer(answer).input_ids, tokenizer(answer).input_ids
        weights = [0.0] * (len(ask) - 1) + [1.0] * len(reply)
        inputs = {"weights": weights, "target_tokens": ids[1:]}
        batch.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    for _ in range(8):
        client.forward_backward(batch, "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    sampler = client.save_weights_and_get_sampling_client(name="pictures").result()
    parameters = tinker.SamplingParams(max_tokens=8, temperature=1.0)
    sampler.sample(prompt=tinker.ModelInput.from_ints(ask), sampling_params=parameters, num_samples=3).result()


def take(page: Page, name: str, picture: Picture) -> None:
    """Writes the picture, with as few colours as it needs."""
    path = FOLDER / f"{name}.png"
    page.goto(picture.address)
    page.wait_for_timeout(3000 if picture.address.startswith("http") else 0)  # the page asks its server
    page.evaluate(
        "document.querySelectorAll('details.episode:first-of-type details').forEach((each) => each.open = true)"
    )
    part = page.locator(picture.part)
    if picture.height is None:
        part.screenshot(path=path)
    else:
        box = part.bounding_box()
        assert box is not None
        clip = {"x": box["x"] - EDGE, "y": box["y"], "width": box["width"] + 2 * EDGE, "height": picture.height}
        page.screenshot(path=path, clip=clip, full_page=True)  # type: ignore[arg-type]
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def make(chromium: str, folder: Path, run: Path) -> None:
    """All pictures. Commands run before a browser does, which ends with what they end."""
    pictures = of_inspect(folder) | of_runs(folder, run) | of_record(folder)
    with serving("serve", "--folder", str(folder / "served")) as address:
        train_by_tinker(address)
        with sync_playwright() as browsers:
            browser = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, picture in (pictures | {"serve": Picture(address, "body")}).items():
                page = browser.new_page(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
                )
                take(page, name, picture)
                page.close()
            browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        make(sys.argv[1], Path(own), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(own) / "online")
