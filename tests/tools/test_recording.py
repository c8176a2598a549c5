"""The recording of the chat for the README: its steps, its frames and the SVG."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from assets import ROOT
from recording.record import COLUMNS, ROWS, TITLE, record
from recording.svg import Frame, spans, write_svg

LARGEST = 150_000  # bytes of the file in the README
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def frames():
    """Frames of the real chat."""
    return record()


def test_the_frames_show_the_main_steps_in_order(frames):
    texts = iter(frame.text for frame in frames)
    for step in (
        "$ lmchat chat",
        "> My dog is called Max.",
        "> /edit 1 My dog is called Bruno.",
        "Your dog is called Bruno.",
        "stopped; /continue goes on",
        "> /continue",
        "Killed",
        "$ lmchat chat --continue",
        "> What is my dog called?\nBruno.",
    ):
        assert any(step in text for text in texts), step


def test_a_continued_reply_has_the_words_of_the_stopped_one(frames):
    stopped = next(frame.text for frame in frames if "\nstopped; " in frame.text)
    before = stopped.partition("story about my dog.\n")[2].partition("\nstopped")[0]
    continued = next(f.text for f in frames if "> /continue\n" in f.text and "prize." in f.text)
    after = continued.partition("> /continue\n")[2].partition("\n1 new + ")[0]
    assert " ".join(after.split()).startswith(" ".join(before.split()))
    assert len(after) > len(before)


def test_frames_hold_no_measured_times(frames):
    assert not any(re.search(r"TTFT|tok/s|\d m?s\b", frame.text) for frame in frames)


def test_the_svg_parses_and_has_a_group_per_frame(frames):
    text = write_svg(frames, COLUMNS, ROWS, TITLE)
    assert len(text) < LARGEST
    root = ElementTree.fromstring(text)
    groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == "f"]
    assert len(groups) == len(frames)
    rows = {f"#{group.get('id')}" for group in root.find(f"{SVG}defs")}
    assert {use.get("href") for use in root.iter(f"{SVG}use")} == rows


def test_the_image_in_the_readme_shows_the_same_dialogue():
    root = ElementTree.parse(ROOT / "docs" / "images" / "chat.svg").getroot()
    shown = {text.text for text in root.iter(f"{SVG}text")}
    for line in ("$ lmchat chat --continue", "Your dog is called Bruno.", "Killed"):
        assert line in shown


def test_frames_are_shown_one_after_the_other():
    rows = (spans("one  two", ["bold"] * 3 + [""] * 5), ())
    frames = [Frame(rows, (1, 0), "a & b", seconds) for seconds in (1.0, 3.0)]
    assert frames[0].text == "one  two"
    text = write_svg(frames, 10, 2, "<title>")
    assert "a &amp; b" in text
    shown = re.findall(r"([\d.]+)%\{visibility:visible\}", text)
    assert shown[0] == "0.000"
    assert "25.000%,100%{visibility:visible}" in text
