"""Pictures as files: well formed, complete, the same bytes for the same timeline, and no trace of them in matplotlib."""

import builtins
import io
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import matplotlib.image
import pytest

from functional_par.errors import ConfigError
from functional_par.pipeline.timeline import Timeline
from functional_par.report.chrome_trace import load
from functional_par.report.picture import Panel, format_of, picture, pictures

from .timelines import CHUNKS, TWO, timeline


def texts(svg):
    return [
        "".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")
    ]


def test_an_svg_is_xml_that_has_every_microbatch_as_text():
    found = texts(picture(TWO, "svg", "1f1b, $2 ranks$", ["rank 0: pp 0"]))
    assert [found.count(text) for text in ("1f1b, $2 ranks$", "rank 0: pp 0", "rank 1", "forward", "backward")] == [
        1
    ] * 5
    numbers = [text for text in found if text in ("0", "1")]
    assert len(numbers) >= len(TWO.spans)


def test_chunks_are_told_apart():
    found = texts(picture(CHUNKS))
    assert {"forward, chunk 0", "forward, chunk 1", "weight-backward, chunk 1"} <= set(found)


def heights(svg, words):
    """Where texts are, from the top."""
    nodes = [node for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")]
    found = {"".join(node.itertext()).strip(): node.get("transform", "") + node.get("y", "") for node in nodes}
    return [float(re.findall(r"[-\d.]+", found[word])[-1]) for word in words]


def test_two_timelines_are_one_above_the_other_on_one_axis():
    long = timeline(3, "0:0F0:0:1 1:1F0:1:2 1:1I0:8:10 2:2F0:2:18", "s")
    data = pictures([Panel(TWO, "above", ["first"]), Panel(long, "below", ["second"])])
    found, order = texts(data), heights(data, ["above", "first", "below", "second"])
    assert order == sorted(order)
    assert {"forward", "backward", "input-backward", "seconds"} <= set(found)
    ticks = [float(text) for text in found if re.fullmatch(r"1\d(\.\d)?", text)]
    assert ticks[: len(ticks) // 2] == ticks[len(ticks) // 2 :] != []


@pytest.mark.parametrize("end", ["svg", "png", "pdf"])
def test_a_timeline_draws_itself(end, tmp_path):
    path = tmp_path / f"mine.{end}"
    TWO.draw(path)
    assert path.read_bytes() == picture(TWO, end, "bubble 33.3%")
    TWO.draw(str(path), "mine", ["a", "b"])
    assert path.read_bytes() == picture(TWO, end, "mine", ["a", "b"])


def test_a_timeline_draws_itself_for_perfetto(tmp_path):
    TWO.draw(tmp_path / "mine.json", labels=["a", "b"])
    found = load(str(tmp_path / "mine.json"))
    assert (found.timeline, found.labels) == (TWO, ("a", "b"))


def test_what_a_timeline_cannot_draw_is_refused_with_the_name(tmp_path):
    with pytest.raises(ConfigError, match=r"^draw .*mine\.gif: the name of a picture ends in"):
        TWO.draw(tmp_path / "mine.gif")
    with pytest.raises(ConfigError, match=r"^draw: .*x\.svg could not be written: No such file"):
        TWO.draw(tmp_path / "nowhere" / "x.svg")


def test_a_png_decodes_and_shows_each_colour():
    pixels = matplotlib.image.imread(io.BytesIO(picture(TWO, "png")))
    colours = {tuple(round(255 * float(x)) for x in pixel[:3]) for row in pixels[::3] for pixel in row[::3]}
    assert {(0x5B, 0x9B, 0xD5), (0x70, 0xAD, 0x47)} <= colours


def test_the_same_timeline_makes_the_same_bytes():
    before = dict(matplotlib.rcParams)
    for form in ("svg", "png", "pdf"):
        assert picture(TWO, form) == picture(TWO, form)
    assert dict(matplotlib.rcParams) == before


def test_a_timeline_without_spans_has_a_picture():
    assert "rank 0" in texts(picture(Timeline(1, ())))


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'functional_par\[pictures\]'"):
        picture(TWO)


def test_the_format_follows_from_the_name():
    assert [format_of(name) for name in ("a.svg", "b/c.PNG", "d.pdf")] == ["svg", "png", "pdf"]
    with pytest.raises(ConfigError, match=r"--output a\.gif: the name of a picture ends in .svg, .png or .pdf"):
        format_of("a.gif")
