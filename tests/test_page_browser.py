"""The report in a real browser: it moves, fits, prints, and asks for nothing."""

import base64
import re

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from trueup.page import render

from browser import BROWSER, DRIVER, Browser
from pages import HOSTILE, Plain, comparison, likelihood, samplers, whole

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromium-driver")


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A whole report, whose model, samplers and notes are called what nobody should be called."""
    cal = whole(model=" ".join(HOSTILE[:5]))
    cal.solvers[0].provenance["base"] = HOSTILE[0]
    compared, listed = comparison(cal, notes=list(HOSTILE)), samplers(cal)
    listed["samplers"][0] |= {"sampler": HOSTILE[0], "grid": HOSTILE[1]}
    path = tmp_path_factory.mktemp("page") / "report.html"
    measured = [Plain(values) for values in (compared, listed, likelihood(cal))]
    path.write_text(render(cal, measured=measured))
    return path


def in_sight(browser, selector):
    """Which of the elements are shown."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.checkVisibility())"
    return browser.run(script, selector)


def shown_pictures(browser, selector):
    script = (
        "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).map(e => e.src)"
    )
    return browser.run(script, f"{selector} img")


def test_nothing_is_asked_for_and_nothing_complained_about(browser, page):
    browser.open(page)
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.run("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert browser.run("return document.images.length") > 50


def test_nothing_that_a_file_says_runs(browser, page):
    browser.open(page)
    assert browser.run("return document.querySelectorAll('script').length") == 2
    assert browser.run("return document.querySelector('[onerror], [onload], base, iframe')") is None
    assert HOSTILE[0] in browser.run("return document.querySelector('.model').textContent")
    assert browser.run("return JSON.parse(document.getElementById('data').textContent).calibration.model")
    # Nor would anything else that got in: the page's policy allows its own script alone.
    attack = (
        "const own = document.createElement('script'); own.textContent = 'window.ran = 1';"
        "document.body.append(own);"
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 2\">');"
        "return window.ran"
    )
    assert browser.run(attack) is None
    assert len(browser.complaints()) >= 2


def test_the_slider_changes_the_picture(browser, page):
    browser.open(page)
    slider = browser.driver.find_element(By.ID, "level")
    slider.send_keys(Keys.HOME)
    seen = []
    for i in range(5):
        assert in_sight(browser, ".level") == [k == i for k in range(5)]
        seen.append(tuple(shown_pictures(browser, ".level")))
        said = browser.run("return document.querySelector('output').textContent")
        assert f"({i + 1} of 5)" in said
        assert slider.get_attribute("aria-valuetext") in said
        slider.send_keys(Keys.ARROW_RIGHT)
    assert len(set(seen)) == 5
    assert all(len(pictures) == 3 for pictures in seen)
    # By mouse: the middle of the track is the middle level.
    browser.run("arguments[0].scrollIntoView({block: 'center'})", slider)
    slider.click()
    assert in_sight(browser, ".level") == [False, False, True, False, False]


def test_before_and_after_change_places_by_mouse_and_keyboard(browser, page):
    browser.open(page)
    assert in_sight(browser, ".set") == [False, True, False]  # after
    after = shown_pictures(browser, ".set")
    browser.driver.find_element(By.CSS_SELECTOR, "label[for=set-0]").click()
    assert in_sight(browser, ".set") == [True, False, False]
    before = shown_pictures(browser, ".set")
    assert len(before) == len(after) == 16
    assert before != after
    browser.driver.find_element(By.ID, "set-0").send_keys(Keys.ARROW_RIGHT)
    assert shown_pictures(browser, ".set") == after
    browser.driver.find_element(By.ID, "set-1").send_keys(Keys.ARROW_RIGHT)
    assert in_sight(browser, ".set") == [False, False, True]


def test_everything_can_be_reached_by_keyboard(browser, page):
    browser.open(page)
    reached = []
    for _ in range(40):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.run("return document.activeElement.id || document.activeElement.tagName"))
    assert {"set-1", "level", "SUMMARY"} <= set(reached)


def test_the_numbers_can_be_copied_as_json(browser, page):
    browser.open(page)
    browser.run("document.querySelector('#json summary').click()")
    browser.driver.implicitly_wait(2)
    text = "return document.getElementById('json-text').textContent"
    found = browser.driver.execute_async_script(
        f"const done = arguments[0]; setTimeout(() => done((() => {{ {text} }})()), 100)"
    )
    assert '"verdict"' in found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 1100])
def test_no_width_scrolls_sideways(browser, page, width, dark):
    browser.open(page, width, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    channels = [int(part) for part in ground[4:-1].split(",")]
    assert (max(channels) < 64) == dark
    # Text in charts is no smaller than 9 pixels of the screen.
    smallest = (
        "return Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.checkVisibility())"
        ".map(t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a))"
    )
    assert browser.run(smallest) >= 9


def test_paper_shows_everything(browser, page):
    browser.open(page, 800, media="print")
    assert all(in_sight(browser, ".set"))
    assert all(in_sight(browser, ".level"))
    assert all(in_sight(browser, "section > details table"))
    assert not any(in_sight(browser, "input, output, #json"))
    pdf = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert pdf.startswith(b"%PDF")
    browser.look(800)  # and back on the screen as it was
    assert sum(in_sight(browser, ".level")) == 1
    assert not any(in_sight(browser, "section > details table"))


def test_without_scripts_all_of_it_is_there(browser, page, tmp_path):
    scriptless = tmp_path / "report.html"
    scriptless.write_text(re.sub(r"<script\b.*?</script>", "", page.read_text(), flags=re.DOTALL))
    browser.open(scriptless)
    assert browser.run("return document.scripts.length") == 0
    assert all(in_sight(browser, ".set"))
    assert all(in_sight(browser, ".level"))
    assert not any(in_sight(browser, "#level"))
