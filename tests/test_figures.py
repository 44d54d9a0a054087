"""The figures: the same bytes every time, nothing cut off or covered, and true to the parts table."""

import importlib
import re
from itertools import pairwise

import matplotlib

matplotlib.use("Agg")  # no windows

import pytest
from conftest import DATA
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

from helpers import figures
from helpers.families import FAMILIES, diff_families
from helpers.figures import ALT, FIGURES, IMAGES, blocks, main, outdated, svg

RESULT = {  # of a benchmark, its variants near each other and far from each other
    "bandwidth_bytes_per_second": 20e9,
    "model": "llama-3.2-1b (random weights)",
    "dtype": "bfloat16",
    "machine": {"name": "some processor"},
    "rows": {
        f"compiled, cache {i}": {
            "tokens_per_second": speed,
            "bytes_per_token": 2.47e9,
            "share_of_limit": speed / 8.1,
        }
        for i, speed in enumerate((0.4, 0.41, 3.9, 4.0, 4.1, 5.2, 7.5))
    }
    | {"compiled, flash": {"note": "GPU only"}},
}
PAIRS = [*pairwise(FAMILIES), ("GPT-2", "Llama 2"), ("Llama 3.2", "GPT-2")]
DRAWINGS = {
    **FIGURES,
    "clocks of Llama 3": lambda: figures.clocks(128, 500_000),
    "blocks with the longest labels": lambda: blocks("Llama 3.1", "Llama 3.2"),
    "blocks from new to old": lambda: blocks("Llama 3", "GPT-2"),
    "roofline": lambda: figures.roofline(RESULT),
}
every_image = pytest.mark.parametrize("name", FIGURES)


@pytest.fixture(scope="module", params=DRAWINGS)
def figure(request):
    figure = DRAWINGS[request.param]()
    figure.draw_without_rendering()
    yield figure
    plt.close(figure)


def texts(figure):
    """Every text that is drawn, tick labels too."""
    for ax in figure.axes:
        found = [child for child in ax.get_children() if isinstance(child, Text)]
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            low, high = sorted(axis.get_view_interval())
            found.append(axis.label)
            found += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
        yield from (t for t in found if t.get_visible() and t.get_text().strip())


def boxes(figure):
    return [p for ax in figure.axes for p in ax.patches if isinstance(p, FancyBboxPatch)]


@every_image
def test_an_image_made_again_is_the_same_file_without_a_date(name):
    first = svg(name)
    assert first == svg(name)
    assert len(first) < 300_000 and b"dc:date" not in first and b"<text" not in first
    pinned = re.search(r"^matplotlib==(.+)$", (DATA.parent / "constraints.txt").read_text(), re.M)
    if matplotlib.__version__ == pinned[1]:  # another version draws other bytes
        assert first == (IMAGES / f"{name}.svg").read_bytes(), "run python -m helpers.figures"


def test_the_folder_holds_these_images_and_a_missing_one_is_noticed(tmp_path):
    assert {f"{name}.svg" for name in FIGURES} == {file.name for file in IMAGES.glob("*.svg")}
    assert outdated(tmp_path) == list(FIGURES)


def test_a_misspelt_option_is_refused():
    with pytest.raises(ValueError, match="--check"):
        main(["--chekc"])


@every_image
def test_an_image_has_a_text_that_says_what_it_shows(name):
    assert list(ALT) == list(FIGURES)
    assert len(ALT[name]) >= 40 and not re.match("(a |the )?(figure|diagram|image|plot)", ALT[name], re.I)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["gate", "rotation", "clocks", "score-against-distance", "tokens-per-character"]
)
def test_decimals_and_large_numbers_of_the_alt_text_stand_in_the_figure(name):
    drawn = " ".join(t.get_text() for t in texts(FIGURES[name]()))
    plt.close("all")
    numbers = re.findall(r"\d+[.,]\d+", ALT[name])
    assert numbers and all(number in drawn for number in numbers)


def test_text_is_11_points_or_more_and_ascii(figure):
    for text in texts(figure):
        assert text.get_fontsize() >= 11, text
        assert text.get_text().replace("\N{MINUS SIGN}", "-").isascii(), text


def test_no_text_is_cut_off_or_lies_on_another(figure):
    places = [(t.get_text(), t.get_window_extent()) for t in texts(figure)]
    for number, (text, place) in enumerate(places):
        assert place.x0 >= 0 and place.x1 <= figure.bbox.x1, text
        assert place.y0 >= 0 and place.y1 <= figure.bbox.y1, text
        for other, there in places[:number]:
            assert not place.padded(-0.5).overlaps(there), (text, other)


def test_the_text_of_a_box_fits_into_it(figure):
    for outline in boxes(figure):
        centre = (
            outline.get_x() + outline.get_width() / 2,
            outline.get_y() + outline.get_height() / 2,
        )
        inside = [t for t in outline.axes.texts if t.get_position() == pytest.approx(centre)]
        room = outline.get_window_extent().padded(-4)
        for extent in (t.get_window_extent() for t in inside if t.get_text()):
            assert room.x0 <= extent.x0 and extent.x1 <= room.x1
            assert room.y0 <= extent.y0 and extent.y1 <= room.y1


def test_axes_with_ticks_have_labels_and_log_scales_say_so(figure):
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            label = axis.get_label().get_text()
            assert label or not len(axis.get_majorticklocs())
            assert ("log" in label) == (axis.get_scale() == "log")


def test_the_card_is_white_and_opaque(figure):
    assert figure.get_facecolor() == (1, 1, 1, 1)


@pytest.mark.parametrize("old, new", PAIRS)
def test_blocks_mark_exactly_what_differs_between_two_families(old, new):
    figure = blocks(old, new)
    marked = {"added": set(), "removed": set(), "kept": set()}
    for outline in boxes(figure):
        change, row = outline.get_label().split(" ", 1)
        marked[change].add(row)
        assert (change == "removed") == (outline.get_linestyle() != "-")
        assert (change == "kept") == (to_hex(outline.get_edgecolor()) == figures.KEPT)
    plt.close(figure)
    changes = diff_families(old, new)
    assert marked["removed"] == {row for row, was, _ in changes if was != "none"}
    assert marked["added"] == {row for row, _, now in changes if now != "none"}
    assert not marked["kept"] & {row for row, *_ in changes}


def test_matplotlibs_settings_stay_as_they_were():
    with plt.style.context("dark_background"):  # a reader's own
        before = dict(matplotlib.rcParams)
        plt.close(importlib.reload(figures).rotation())
        assert dict(matplotlib.rcParams) == before
