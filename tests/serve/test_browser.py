"""The server's page in headless Chromium: figures, curves and samples, without a request to anywhere else.

Skipped where Chromium (Debian: `apt-get install chromium`) or the playwright package is missing.
"""

import shutil

import pytest
import tinker
from tinker import types

from tests.serve.servers import KEY, OTHER_KEY, running, tree_of_data
from treewise.testing.families import tiny_model

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("test_serve_browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]


class Words:
    """A tokenizer whose words would be elements of the page, if it took text for HTML."""

    eos_token_id = None

    def decode(self, ids):
        return " ".join(f"<b id=bad>{each}</b>" for each in ids)

    def save_pretrained(self, folder):
        pass


def test_the_page_shows_what_the_server_did(tmp_path):
    with running(tmp_path, tiny_model("llama"), Words()) as address:
        client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
        run = client.create_lora_training_client(base_model="tiny", rank=2, seed=0).result()
        for _ in range(3):
            run.forward_backward(tree_of_data("cross_entropy"), "cross_entropy")
            run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        sampler = run.save_weights_and_get_sampling_client().result()
        sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=4, stop=[])).result()
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=300_000)
            page = browser.new_page()
            page.set_default_timeout(300_000)
            asked, errors = [], []
            page.on("request", lambda each: asked.append(each.url))
            page.on("pageerror", lambda each: errors.append(str(each)))
            page.on("console", lambda each: errors.append(each.text) if each.type == "error" else None)
            page.goto(f"{address.url}/#key={OTHER_KEY}")
            page.wait_for_selector("text=tiny:")
            assert run.model_id not in page.inner_text("body")
            page.goto(f"{address.url}/#key={KEY}")
            page.wait_for_selector("polyline")
            text = page.inner_text("body")
            assert "3 steps, loss" in text
            assert run.model_id in text
            assert "0 of 1,024" in text
            assert "<b id=bad>" in text
            assert page.query_selector("#bad") is None
            assert len(page.get_attribute("polyline", "points").split()) == 3
            assert {each.split("/", 3)[2] for each in asked} == {address.url.removeprefix("http://")}
            assert not [each for each in errors if "favicon" not in each and "404" not in each]
            browser.close()
        client.close("success").result()
