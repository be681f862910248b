"""The page in a real headless Chromium, against a server with the bundled model and its MTP drafts."""

import re
import shutil

import pytest
from real import serve_model

from ggufspec.tools.server.app import PAGE

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def test_the_page_asks_for_nothing_outside():
    text = PAGE.read_text()
    assert text.startswith("<!doctype html>")
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", text)
    assert "innerHTML = '" in text and not re.search(r"innerHTML = [^']", text)  # never with a model's text


@pytest.fixture(scope="module")
def page():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra `test`)")
    if not BROWSER or not DRIVER:
        pytest.skip("no chromium and chromedriver on this machine (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--no-proxy-server"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    argv = ("-c", "2048", "-np", "2", "--alias", "tiny", "--device", "none")
    with serve_model(*argv, "--spec-type", "draft-mtp", "--spec-draft-n-max", "3") as http:
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        driver.implicitly_wait(5)
        try:
            driver.get(f"{http.base_url}/")
            yield driver
        finally:
            driver.quit()


def find(page, name):
    return page.find_element("id", name)


def wait(page, condition, timeout_s=60):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(page, timeout_s, poll_frequency=0.05).until(condition)


def ask(page, text, max_tokens, temperature="0"):
    for name, value in (("max_tokens", str(max_tokens)), ("temperature", temperature)):
        find(page, name).clear()
        find(page, name).send_keys(value + "\t")
    page.execute_script("document.getElementById('input').value = arguments[0]", text)  # typing is slow
    find(page, "input").send_keys("\n")


def test_settings_come_from_the_server(page):
    wait(page, lambda p: "tiny" in find(p, "model").text)
    assert find(page, "top_k").get_attribute("value") == "40"
    assert find(page, "temperature").get_attribute("value") == "0.8"
    assert find(page, "seed").get_attribute("value") == "-1"


def test_chat_streams_and_the_panel_shows_drafts(page):
    ask(page, "Write add", 60)
    wait(page, lambda p: p.find_elements("css selector", ".turn.assistant .body pre"))
    wait(page, lambda p: find(p, "stop").get_attribute("disabled"))
    assert "def add" in page.find_element("css selector", ".turn.assistant .body").text
    wait(page, lambda p: find(p, "drafted").text not in ("–", "0"))
    assert float(find(page, "speed").text) > 0 and int(find(page, "n-tokens").text) <= 60
    assert find(page, "drafter").text == "(draft-mtp)"
    assert float(find(page, "draft-ms").text) > 0 and float(find(page, "verify-ms").text) > 0
    assert re.fullmatch(r"\d+ \(\d+%\)", find(page, "accepted").text)
    rows = page.find_elements("css selector", ".position")
    assert len(rows) == 3 and re.search(r"\d+ of \d+", rows[0].text)
    counts = [int(row.find_element("css selector", ".count").text.split(" ")[0]) for row in rows]
    assert counts == sorted(counts, reverse=True) and counts[0] > 0


def test_stop_and_new_chat(page):
    ask(page, "Write a very long class", 1500)
    wait(page, lambda p: len(p.find_elements("css selector", ".turn.assistant")) == 2)
    wait(page, lambda p: p.find_elements("css selector", ".turn.assistant .body")[1].text)
    find(page, "stop").click()
    wait(page, lambda p: find(p, "stop").get_attribute("disabled"))
    assert page.find_elements("css selector", ".turn.assistant .note")[1].text == "Stopped."
    find(page, "clear").click()
    assert not page.find_elements("css selector", ".turn")


def test_markup_in_texts_is_text(page):
    ask(page, "<img src=x onerror=document.title='bad'>", 4)
    wait(page, lambda p: find(p, "stop").get_attribute("disabled"))
    assert "<img src=x" in page.find_element("css selector", ".turn.user .body").text
    assert not page.find_elements("css selector", ".turn img") and page.title == "ggufspec"


def test_an_error_is_shown(page):
    ask(page, "word " * 2500, 4)
    note = wait(page, lambda p: next(iter(p.find_elements("css selector", ".note.error")), None))
    assert "exceeds the available context size" in note.text


def test_settings_last_for_the_tab(page):
    find(page, "top_k").clear()
    find(page, "top_k").send_keys("7\t")
    page.refresh()
    wait(page, lambda p: find(p, "top_k").get_attribute("value") == "7")


def test_no_request_left_the_machine(page):
    import json

    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith(("http://127.0.0.1:", "data:")) for url in urls), urls
    assert not [entry for entry in page.get_log("browser") if "Content Security Policy" in entry["message"]]
