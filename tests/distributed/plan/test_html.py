"""The report: what is in the file, and how a browser shows it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_dist.distributed import plan_parallelism
from composer_dist.distributed.plan.html import fewer
from composer_dist.distributed.plan.plan import ParallelPlan
from tests.kit.huggingface import llama

pytestmark = pytest.mark.promise(115)


def planned(model: nn.Module, config: Any = "fsdp") -> ParallelPlan:
    return plan_parallelism(model, config, world_size=4, optimizer=torch.optim.AdamW(model.parameters()))


def embedded(file: Path) -> Any:
    text = file.read_text()
    return json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])


class Hostile(nn.Module):
    """Names that would end the script, or be markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("</script><script>owned=1</script>", nn.Linear(4, 4))
        self.add_module("<!--<script>", nn.Linear(4, 4))
        self.add_module("<b onclick=owned()>&amp;'\"", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


def test_the_file_has_the_plan_s_names_and_numbers(tmp_path: Path) -> None:
    model = llama()
    plan, file = planned(model), tmp_path / "report.html"
    plan.to_html(file, (2, 16), rank=1, device_memory=2**20, topology="a100")
    found, memory = embedded(file), plan.memory((2, 16), rank=1)
    assert {one["name"]: one["text"] for one in found["modules"]} == {
        name: plan.explain(name) for name in plan.modules
    }
    assert {kind: one["most"] for kind, one in found["kinds"].items()} == {
        kind: getattr(memory, kind) for kind in found["kinds"]
    }
    assert found["modules"][0]["bytes"] == sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    assert found["peak"] == memory.peak == max(sum(numbers) for _, _, *numbers in found["timeline"])
    assert (found["rank"], found["ranks"], found["device_memory"]) == (1, 4, 2**20)
    assert found["traffic"] == [vars(one) for one in plan.communication((2, 16), rank=1, topology="a100")]
    (weight,) = next(
        one["tensors"] for one in found["modules"] if one["name"].endswith("layers.0.mlp.up_proj")
    )
    assert weight[2] == plan.explain(weight[0])


def test_the_file_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    planned(llama()).to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text().replace("http://www.w3.org/2000/svg", "")
    assert not any(word in text for word in ("http:", "https:", " src=", "url(", "@import"))
    assert "default-src 'none'" in text


def test_names_cannot_end_the_script(tmp_path: Path) -> None:
    model = Hostile()
    planned(model).to_html(tmp_path / "report.html", torch.zeros(2, 4))
    text = (tmp_path / "report.html").read_text()
    assert (text.count("</script>"), text.count("<!--")) == (2, 0)
    names = [one["name"] for one in embedded(tmp_path / "report.html")["modules"]]
    assert names == [name for name, _ in model.named_modules()]


def test_of_a_long_timeline_the_highest_moments_stay() -> None:
    moments = [("forward", str(i), {"activations": i % 1000, "logits": 1}) for i in range(3001)]
    kept = fewer(moments, 1500)
    assert len(kept) <= 1500
    assert max(one["activations"] for _, _, one in kept) == 999
    assert fewer(moments[:7], 1500) == moments[:7]
    assert fewer([], 1500) == []


@pytest.fixture(scope="module")
def browser() -> Any:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for one in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "report.html"
    planned(llama(num_hidden_layers=12)).to_html(file, (2, 16), device_memory=2**19)
    return file.as_uri()


def shown(browser: Any) -> list[str]:
    return [one.text for one in browser.find_elements("css selector", "#tree .name") if one.is_displayed()]


def press(browser: Any, *keys: str) -> None:
    for key in keys:
        browser.switch_to.active_element.send_keys(key)


@pytest.mark.browser
def test_it_opens_expands_searches_and_explains_by_keyboard(browser: Any, report: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(report)
    assert "It does not fit" in browser.find_element("id", "fit").text
    assert browser.find_element("css selector", "svg .limit + text").text == "device memory 512.0 KiB"
    assert shown(browser)[:4] == ["LlamaForCausalLM", "model", "embed_tokens", "layers"]
    press(browser, "/", "layers.7.mlp.up", Keys.ENTER)
    assert shown(browser) == ["model.layers.7.mlp.up_proj"]
    detail = browser.find_element("id", "detail").text
    assert "model.layers.7.mlp.up_proj: part of unit model.layers.7" in detail
    assert "weight: float32" in detail
    press(browser, "/", Keys.ESCAPE)
    rows = shown(browser)
    assert "0 to 10 (11 alike)" in rows  # the last one is not resharded
    assert "up_proj" in rows
    browser.get(report)
    browser.find_element("css selector", "#tree > li > .row").click()  # closes what is open and chosen
    assert shown(browser) == ["LlamaForCausalLM"]
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ENTER)
    assert shown(browser) == ["LlamaForCausalLM", "model", "lm_head"]
    assert browser.find_element("id", "detail").text.startswith("model\nLlamaModel")
    assert browser.get_log("browser") == []


@pytest.mark.browser
def test_hostile_names_are_text(browser: Any, tmp_path: Path) -> None:
    model = Hostile()
    planned(model).to_html(tmp_path / "report.html")
    browser.get((tmp_path / "report.html").as_uri())
    assert shown(browser)[1:] == [name for name, _ in model.named_children()]
    assert browser.execute_script("return typeof owned") == "undefined"
    assert browser.get_log("browser") == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1024, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_screens_light_and_dark(
    browser: Any, report: str, tmp_path: Path, width: int, scheme: str
) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(report)
    wide, dark = browser.execute_script(
        "return [document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
    )
    assert wide <= width
    assert (dark == "rgb(255, 255, 255)") == (scheme == "light")
    assert browser.save_screenshot(str(tmp_path / f"{width}_{scheme}.png"))
    assert browser.get_log("browser") == []
