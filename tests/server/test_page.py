"""The page at `/` in a headless Chromium: what a user sees while it streams, stops and compares.

JFLASH_SCREENSHOTS names a folder for pictures of it.
"""

import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.server.conftest import started

COMPILED_FULLY = True  # the server runs longer than it compiles
QUESTION = "8 players share 168 crayons from Emma equally. How many crayons does each get?"
ANSWER = "Each player gets 168 / 8 = 21 crayons.\n#### 21"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["JFLASH_CHROMIUM"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, server):
    page = browser.new_page(viewport={"width": 1000, "height": 700})
    complaints = list[str]()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    yield page
    # Chromium itself says so of the error that a test asks for.
    assert all("status of 400" in text for text in complaints), complaints


def picture(page, name: str) -> None:
    if folder := os.environ.get("JFLASH_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def ask(page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def test_an_answer_streams_with_each_step_in_a_colour(page):
    expect(page.locator("#model")).to_have_text("tiny-math/target")
    ask(page, QUESTION)
    expect(page.locator(".answer[data-done=stop]")).to_have_count(1)
    assert page.locator(".text").text_content() == ANSWER
    steps = page.locator(".text span")
    colours = [step.get_attribute("class") for step in steps.all()]
    assert colours == ["", "step0", "step1"]
    titles = [step.get_attribute("title") for step in steps.all()]
    assert re.fullmatch(r'prefill: token 1\n1 "Each" \d+\.\d %', titles[0]), titles
    step = titles[1].splitlines()
    assert re.fullmatch(r"step 1: \d+ tokens, numbers 2 to \d+", step[0]), step
    assert re.fullmatch(r'2 "[^"]+" \d+\.\d %', step[2]), step
    assert len(step) == 1 + int(step[0].split()[2])
    figures = page.locator(".figures").text_content()
    assert re.search(r"^22 tokens · τ 10\.50 · \d+ tokens/s · stop", figures), figures
    picture(page, "answer")


def test_plain_beside_speculative_gives_equal_texts(page):
    page.click("#reset")
    page.check("#both")
    ask(page, QUESTION)
    expect(page.locator(".verdict")).to_have_text("✓ equal texts", timeout=20_000)
    one, two = page.locator(".text").all_text_contents()
    assert one == two == ANSWER
    fast, plain = page.locator(".figures").all_text_contents()
    assert "τ 10.50" in fast and "τ 1.00" in plain
    picture(page, "both")
    page.uncheck("#both")


def test_drawn_texts_are_equal_too(page):
    page.click("#reset")
    page.check("#both")
    page.fill("#temperature", "1")
    ask(page, QUESTION)
    expect(page.locator(".verdict")).to_have_text("✓ equal texts", timeout=20_000)
    page.fill("#temperature", "0")
    page.uncheck("#both")


def test_two_errors_are_no_equal_texts(page):
    page.click("#reset")
    page.check("#both")
    page.fill("#tokens", "9999")
    ask(page, "hi")
    expect(page.locator(".error")).to_have_count(2)
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".verdict")).to_have_count(0)
    page.fill("#tokens", "256")
    page.uncheck("#both")


def test_a_reset_forgets_the_answer_that_streams(page):
    """What is asked next does not bring the old turn with it."""
    page.click("#reset")
    page.fill("#tokens", "400")
    page.fill("#temperature", "2")
    ask(page, "first")
    expect(page.locator(".text span").nth(1)).to_be_visible()
    page.click("#reset")
    expect(page.locator("#send")).to_be_enabled()
    page.fill("#tokens", "4")
    page.fill("#prompt", "second")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "second"}]
    expect(page.locator(".answer[data-done]")).to_have_count(1)
    page.fill("#temperature", "0")


def test_stop_ends_an_answer_and_its_slot(page, server):
    page.click("#reset")
    page.fill("#tokens", "400")
    page.fill("#temperature", "2")
    ask(page, "Tell me <b>everything</b>.")
    expect(page.locator(".text span").nth(1)).to_be_visible()
    page.click("#stop")
    expect(page.locator(".answer[data-done]")).to_have_count(1)
    assert page.locator(".user").text_content() == "Tell me <b>everything</b>."
    expect(page.locator("#send")).to_be_enabled()
    page.wait_for_timeout(500)
    assert server.metric("num_requests_running") == 0
    picture(page, "stopped")


def test_an_error_is_shown(page):
    page.click("#reset")
    page.fill("#tokens", "9999")
    ask(page, "hi")
    expect(page.locator(".error")).to_contain_text("pass the context")
    picture(page, "error")


def test_a_key_is_asked_for(browser, tmp_path):
    """Beside that, that a server with a key lets nobody else in."""
    small = ("--max-batch", "1", "--max-context", "64")
    server = started(tmp_path / "log", *small, JFLASH_API_KEY="k")
    try:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#model")).to_have_text("a key is needed")
        page.fill("#key", "k")
        page.locator("#key").blur()
        expect(page.locator("#model")).to_have_text("tiny-math/target")
    finally:
        server.process.kill()
        server.process.wait()
