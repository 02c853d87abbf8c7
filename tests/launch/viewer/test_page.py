"""The page of `headrace view` in Chromium: it shows what the files say, fast, and runs nothing that a model wrote."""

import json
from pathlib import Path

from support.chromium import Page, timed
from support.viewed_run import sample, serve, with_call, write_metrics, write_samples

HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>\u202e</div>]]>"
COUNT = "document.querySelector('#count').textContent"
DETAIL = "document.querySelector('#detail').innerText.replace(/\\s+/g, ' ')"


def listed(page: Page, place: int) -> list[str]:
    """The cells of a line of the list."""
    return json.loads(
        page.run(
            f"JSON.stringify([...document.querySelectorAll('#visible .row')[{place}].children].map((e) => e.textContent))"
        )
    )


def type_into(page: Page, field: str, text: str) -> None:
    page.run(
        f"(() => {{ const e = document.getElementById({json.dumps(field)}); e.value = {json.dumps(text)};"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_filters_sorting_and_search_choose_among_the_samples(tmp_path: Path):
    lines = [sample(step, number) for step in (1, 2, 3) for number in range(16)]
    write_samples(tmp_path, [*lines, sample(4, 0, response="the Answer", reward=-1.5)])
    page = Page(tmp_path)
    page.open(serve(tmp_path).address)
    page.until(f"{COUNT} === '49 of 49 samples'")
    for field, text, expected in (
        ("step-from", "2", 33), ("step-to", "2", 16), ("reward-from", "1", 3), ("reward-from", "", 16), ("staleness-from", "1", 10),
        ("words", "answer", 0),
    ):  # fmt: skip
        type_into(page, field, text)
        page.until(f"{COUNT} === '{expected} of 49 samples'")
    page.click("button[type=reset]")
    page.until(f"{COUNT} === '49 of 49 samples'")
    page.click("#head [data-name=reward] button")
    assert listed(page, 0)[2] == "-1.5" and "the Answer" in listed(page, 0)[-1]
    page.click("#head [data-name=reward] button")
    assert listed(page, 0)[2] == "1"
    page.click("#with-cut")
    page.until(f"{COUNT} === '3 of 49 samples'")
    assert not page.complaints()


def test_a_sample_is_shown_token_by_token_in_the_colours_of_its_numbers(tmp_path: Path):
    write_samples(tmp_path, [sample(2, 1, metrics={"right/length": 3.0}, notes={"why": "because"})])
    page = Page(tmp_path)
    page.open(serve(tmp_path).address)
    page.until(f"{COUNT} === '1 of 1 samples'")
    page.click("#visible .row")
    page.until("document.querySelectorAll('#detail .text span').length === 8")
    shown = page.run(DETAIL)
    assert "reward 0.25" in shown and "right/length 3" in shown and "why: because" in shown and "8 with a loss" in shown
    assert (
        page.run("[...document.querySelectorAll('#detail .text span')].map((e) => e.textContent).join('')")
        == sample(2, 1)["response"]
    )
    colours = {}
    for kind in ("none", "logprob", "ratio", "mismatch"):
        page.run(
            f"(() => {{ const e = document.querySelector('#colour'); e.value = '{kind}'; e.dispatchEvent(new Event('change')); }})()"
        )
        colours[kind] = page.run(
            "[...document.querySelectorAll('#detail .text span')].map((e) => e.style.backgroundColor)"
        )
    tokens = sample(2, 1)["tokens"]
    assert set(colours["none"]) == {""}
    equal = [ours == theirs for ours, theirs in zip(tokens["trainer"], tokens["generator"], strict=True)]
    assert [colour == "" for colour in colours["mismatch"]] == equal and any(equal) and not all(equal)
    alpha = [
        float(colour.rstrip(")").split(",")[3]) if colour.count(",") == 3 else 1.0 for colour in colours["logprob"]
    ]
    assert sorted(range(8), key=lambda place: alpha[place]) == sorted(
        range(8), key=lambda place: -tokens["trainer"][place]
    )
    page.run(
        "document.querySelectorAll('#detail .text span')[2].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    told = page.run("document.querySelector('#token').textContent")
    assert f"generator {tokens['generator'][2]:g}" in told and f"trainer {tokens['trainer'][2]:g}" in told


def test_a_wrong_call_of_a_tool_is_found_with_three_clicks(tmp_path: Path):
    right = [with_call(step, number, "37*48", "1776", "1776") for step in (1, 2, 3) for number in range(20)]
    write_samples(tmp_path, [*right[:30], with_call(2, 40, "37*4", "148", "148"), *right[30:], sample(3, 50, reward=0)])
    page = Page(tmp_path)
    page.open(serve(tmp_path).address)
    page.until(f"{COUNT} === '62 of 62 samples'")
    page.click("#with-calls")
    page.click("#head [data-name=reward] button")
    page.click("#visible .row")
    page.until("document.querySelector('#detail details') !== null")
    shown = page.run(DETAIL)
    assert "calc(37*4) → 148" in shown and "37*48=" in shown
    assert page.run("[...document.querySelectorAll('#detail details')].map((e) => e.open)") == [False, False, True], (
        "folded"
    )


def test_a_call_that_failed_is_open(tmp_path: Path):
    failed = with_call(1, 0, "37*", '{"error": "SyntaxError: 37*"}', "5", failed=True)
    write_samples(tmp_path, [sample(1, 1), failed])
    page = Page(tmp_path)
    page.open(serve(tmp_path).address)
    page.until(f"{COUNT} === '2 of 2 samples'")
    page.click("#with-failed")
    page.click("#visible .row")
    page.until("document.querySelector('#detail details[open]') !== null")
    assert "SyntaxError" in page.run(DETAIL)


def test_what_a_model_wrote_is_shown_and_never_run_and_nothing_else_is_asked_for(tmp_path: Path):
    folder = tmp_path / "<script>window.ran = 3<"
    folder.mkdir()
    hostile = with_call(1, 0, HOSTILE, HOSTILE, HOSTILE) | {"prompt": HOSTILE, "group": HOSTILE, "finish": HOSTILE}
    hostile |= {"rewards": {HOSTILE: 1.0}, "metrics": {HOSTILE: 1.0}, "notes": {HOSTILE: HOSTILE}}
    write_samples(folder, [hostile, sample(1, 1, response=HOSTILE, tokens=None)])
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward/mean": 1.0, HOSTILE: 2.0}) + "\n")
    server = serve(folder)
    page = Page(tmp_path)
    page.open(server.address)
    page.until(f"{COUNT} === '2 of 2 samples'")
    page.until("document.querySelectorAll('.chart').length === 1")
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    for place in (1, 0):
        page.run(f"document.querySelectorAll('#visible .row')[{place}].click()")
        page.until(f"{DETAIL}.includes('<script>window.ran = 1</script><img src=x')")
        page.run("document.querySelectorAll('#detail details').forEach((e) => { e.open = true; })")
    page.run("document.querySelectorAll('#names input').forEach((e) => e.click())")
    assert page.run("window.ran") is None
    assert page.run("document.querySelectorAll('img, #detail script').length") == 0
    assert {address.split("?")[0].replace(server.address, "") for address in page.requested()} <= {
        "", "about:blank", "data:,", "rows", "sample", "metrics", "search",
    }  # fmt: skip
    assert not page.complaints()


def test_the_page_follows_a_run_that_goes_on_and_one_that_is_resumed(tmp_path: Path):
    write_samples(tmp_path, [sample(1, 0)])
    write_metrics(tmp_path, range(1))
    page = Page(tmp_path)
    page.open(serve(tmp_path).address)
    page.until("document.querySelector('#state').textContent === 'step 1'")
    write_samples(tmp_path, [sample(2, 0), sample(3, 0)])
    write_metrics(tmp_path, range(1, 3))
    page.until(f"{COUNT} === '3 of 3 samples'")
    page.until("document.querySelector('#state').textContent === 'step 3'")
    for name in ("samples.jsonl", "metrics.jsonl"):  # resumed after step 1
        path = tmp_path / name
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    page.until(f"{COUNT} === '1 of 1 samples'")
    write_metrics(tmp_path, range(1, 2))
    page.until("document.querySelector('#state').textContent === 'step 2'")
    charts = page.run("[...document.querySelectorAll('.chart b')].map((e) => e.textContent)")
    assert charts == ["reward/mean", "actor/entropy"]


def test_200_steps_of_128_samples_are_listed_and_filtered_within_a_second_of_work(tmp_path: Path):
    write_samples(tmp_path, (sample(step, number, 32) for step in range(1, 201) for number in range(128)))
    write_metrics(tmp_path, range(200))
    page = Page(tmp_path)
    server = serve(tmp_path)

    def first_paint() -> None:
        page.open(server.address)
        page.until(f"typeof found !== 'undefined' && {COUNT} === '25,600 of 25,600 samples'")

    assert timed(page, first_paint) < 1
    for field, text, expected in (("reward-from", "1", "5,000"), ("words", "3:", None)):
        seconds = timed(page, lambda: (type_into(page, field, text), page.until(f"!{COUNT}.startsWith('25,600')")))  # noqa: B023
        assert seconds < 1
        assert expected is None or page.run(COUNT).startswith(expected)
        page.click("button[type=reset]")
        page.until(f"{COUNT}.startsWith('25,600')")
