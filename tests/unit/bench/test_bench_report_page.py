"""The HTML report and its PNGs. Fake: all results are made up by a seeded model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pdserve.bench.report import figures, write_html, write_pngs
from pdserve.bench.report.chapter import Chapter
from pdserve.bench.report.contents import contents_of
from pdserve.bench.report.figures_requests import MOST_BARS
from pdserve.bench.report.picture import Table
from pdserve.bench.results import Results
from pdserve.bench.slo import Slo
from pdserve.rpc.errors import ConfigError
from tests.unit.bench.bench_report_examples import COLOCATED, READ, WRITE, closed, example, partial

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Structure(HTMLParser):
    """What a page consists of; complains about what does not nest."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.images: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag == "svg":
            self.images.append(found.get("aria-label") or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(
    results: Sequence[Results], folder: Path, rate: float | None = None, chapters: Sequence[Chapter] = ()
) -> tuple[str, Structure]:
    """The page's text and its structure."""
    path = folder / "report.html"
    write_html(results, path, rate=rate, chapters=chapters)
    page = path.read_text(encoding="utf-8")
    structure = Structure()
    structure.feed(page)
    structure.close()
    assert structure.open == []
    return page, structure


def few(shape: object = WRITE, rates: Sequence[float] = (8.0,), **asked: object) -> Results:
    """A small example; of one rate, for a page of several takes long to draw."""
    return example(shape, rates, **{"requests": 12, "tokens": 6, **asked})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rendered:
    """A page that is only looked at."""

    results: list[Results]
    page: str
    structure: Structure


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """Three configurations at several rates, drawn once for this file."""
    results = [few(COLOCATED), few(READ), few(WRITE, (2.0, 8.0))]
    return Rendered(results, *page_of(results, tmp_path_factory.mktemp("page")))


def test_every_configuration_and_every_run_is_in_the_page(rendered: Rendered) -> None:
    """Nothing that was measured is left out, whatever the page opens with."""
    results = rendered.results
    said = " ".join(rendered.structure.text)
    for letter, each in zip("ABC", results, strict=True):
        assert said.count(f"{letter} {each.label}") > 5
    runs = said[said.index("Every run in figures") :]
    assert [len(re.findall(rf"{letter} {results[at].label}", runs)) for at, letter in enumerate("ABC")] == [1, 1, 2]
    for named in ("ratio of attainments at r = 8", "ratio of good rates at r = 8", "ratio of goodputs"):
        assert named in said
    for fact in ("127.0.0.1:8000 (gRPC)", "WRITE", "shm", "2K/1K", "like vllm", "an example CPU, 2 cores", "2026-11-30",
                 "TTFT ≤ 1 s and ITL (p99 of each request) ≤ 50 ms"):  # fmt: skip
        assert fact in said


def test_the_page_needs_nothing_from_outside(rendered: Rendered) -> None:
    """No script, no address, no style sheet, no font: only places in the page itself."""
    page, structure = rendered.page, rendered.structure
    assert all(address.startswith(("#", "data:,")) for address in structure.addresses)
    assert "script" not in structure.tags
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert all(inside.startswith("#") for inside in re.findall(r"url\(([^)]*)\)", page))


def test_every_figure_has_words_and_its_numbers(rendered: Rendered) -> None:
    """Who cannot see a figure reads what it shows, and a table has each of its numbers."""
    structure = rendered.structure
    pictures = contents_of(rendered.results).pictures
    assert len(structure.images) == 2 * len(pictures)
    for picture in pictures:
        alt = " ".join((f"{picture.title}.", *picture.finding))
        assert structure.images.count(alt) == 2
        assert picture.table.rows
        assert all(len(row) == len(picture.table.columns) for row in picture.table.rows)
        assert picture.key in structure.ids


def test_ids_are_unique_and_references_meet_them(rendered: Rendered) -> None:
    """A hatch or a clip of one figure is never that of another, and none is missing."""
    page, structure = rendered.page, rendered.structure
    assert len(structure.ids) == len(set(structure.ids))
    wanted = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
    assert wanted <= set(structure.ids)


def test_labels_and_messages_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    """Markup, mathematics and templates in what others wrote show as they are."""
    bad = '<script>alert(1)</script> & "quoted" $x_1$ {{ 7 * 7 }} --> ]]>'
    made = few(failing=0.5, label=bad)
    record = next(record for record in made.runs[0].requests if record.error)
    assert record.error is not None
    broken = replace(record, error=replace(record.error, message="<b>no</b>", reason="<i>"))
    run = made.runs[0]
    run = replace(run, requests=tuple(broken if each is record else each for each in run.requests))
    page, structure = page_of([replace(made, runs=(run,))], tmp_path)
    assert "<script" not in page
    assert "<b>no" not in page
    assert bad in "".join(structure.text)
    assert "<b>no</b>" in "".join(structure.text)
    assert "script" not in structure.tags


def test_a_partial_result_is_told_before_anything_else(rendered: Rendered, tmp_path: Path) -> None:
    """Its reason stands above the first number, and the run is marked in the tables; so is a doubtful one."""
    doubtful = few(READ)
    doubtful = replace(doubtful, runs=(replace(doubtful.runs[0], doubts=("the KV cache moved over <memmove>",)),))
    page, structure = page_of([doubtful, partial(few(), "the endpoint closed <the> connection")], tmp_path)
    said = " ".join(structure.text)
    assert said.index("Partial result.") < said.index("Result: attainment")
    assert "did not run to its end: the endpoint closed <the> connection" in said
    assert "PARTIAL" in said
    assert page.count("(partial)") > 2
    assert said.index("Doubtful.") < said.index("Result: attainment")
    assert "A READ 1P1D at 8 req/s: the KV cache moved over <memmove>." in said
    assert "whole; the KV cache moved over <memmove>" in said
    assert not [word for word in ("Partial result.", "Doubtful.") if word in " ".join(rendered.structure.text)]


def test_failures_are_counted_by_reason(tmp_path: Path) -> None:
    """Each reason has its count and a message; the counts are those of the records."""
    made = few(failing=0.6, requests=30)
    _, structure = page_of([made], tmp_path)
    rows = "|".join(part.strip() for part in structure.text if part.strip())
    for reason in ("NO_ENGINES", "DEADLINE_EXCEEDED"):
        many = sum(record.error is not None and record.error.reason == reason for record in made.runs[0].requests)
        assert many > 0
        assert re.search(rf"{reason}\|[^|]+\|{many}\|30", rows)


def test_the_same_results_make_the_same_bytes(tmp_path: Path) -> None:
    """A page that changed says that the results did; no clock and no chance plays a part."""
    first, second = page_of([few()], tmp_path)[0], page_of([few()], tmp_path)[0]
    assert first == second


def test_pngs_are_one_a_figure_in_the_pages_order_and_the_same_each_time(tmp_path: Path) -> None:
    """Every figure of the page is there as a picture with its title, none twice; drawn again it has the same bytes."""
    results = [few()]
    paths, again = (write_pngs(results, tmp_path / "made" / name) for name in ("a", "b"))
    assert [path.stem for path in paths] == [picture.key for picture in contents_of(results).pictures]
    assert len(set(paths)) == len(paths)
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") == 2320


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The caller hears which file and why."""
    nothing = replace(few(), runs=())
    with pytest.raises(ConfigError, match=r"cannot write .*nowhere"):
        write_html([nothing], tmp_path / "nowhere" / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write into .*file"):
        write_pngs([nothing], tmp_path / "file")


EXTREMES = {
    "one request of one token": lambda: [few(requests=1, tokens=1)],
    "all failed": lambda: [few(failing=1.0)],
    "no SLO": lambda: [few(slo=Slo())],
    "SLO on the longest gap only": lambda: [few(slo=Slo(itl=0.03, itl_of="max"))],
    "a very long label": lambda: [few(label="a label with many words " * 20 + "x" * 400)],
    "nothing was run": lambda: [replace(few(), runs=(), goodput=None, partial=True, why_partial="no endpoint")],
    "a closed loop beside an open one": lambda: [few(), closed(few(READ))],
    "neither parts nor a label": lambda: [stripped(few(label=" "))],
}


def stripped(results: Results) -> Results:
    """As an endpoint that says nothing about itself is measured."""
    runs = tuple(
        replace(run, requests=tuple(replace(each, parts={}, mode="", transport="") for each in run.requests))
        for run in results.runs
    )
    return replace(results, runs=runs, target=replace(results.target, mode="", transport="", engines=()))


@pytest.mark.parametrize("case", EXTREMES)
def test_extremes_make_a_whole_page(case: str, tmp_path: Path) -> None:
    """Whatever a run came to, the report of it is well formed, and no number of it is nan or inf."""
    results = EXTREMES[case]()
    _, structure = page_of(results, tmp_path)
    said = " ".join(structure.text + structure.images)
    assert not re.search(r"\b(nan|inf)\b", said)


@pytest.mark.parametrize("case", ["a very long label", "nothing was run"])
def test_extremes_make_whole_pictures(case: str, tmp_path: Path) -> None:
    """A picture is drawn for all that the page shows."""
    results = EXTREMES[case]()
    assert len(write_pngs(results, tmp_path / "png")) == len(contents_of(results).pictures)


def test_twenty_configurations_keep_their_letters() -> None:
    """Every one is named at the end of its line, though colours come again."""
    results = [few((COLOCATED, READ, WRITE)[at % 3], seed=at, label=f"number {at}", requests=4) for at in range(20)]
    picture = contents_of(results).pictures[0]
    with figures.styled():
        drawn = figures.svg(picture.draw(figures.Frame()), "x", "")
    for at, letter in enumerate("ABCDEFGHIJKLMNOPQRST"):
        assert re.search(rf">{letter}\s+number {at}<", drawn)


def test_more_requests_than_bars_are_shown_by_the_slowest_of_a_group() -> None:
    """No slow request is hidden by thinning out: each bar is the slowest of its group, and the note says so."""
    made = few(requests=2 * MOST_BARS + 1, tokens=2)
    picture = contents_of([made]).pictures[-1]
    assert len(picture.table.rows) <= MOST_BARS
    assert picture.note.startswith("Each bar is the slowest of 3 in a row.")
    slowest = max(record.ttft or 0.0 for record in made.runs[0].requests)
    assert max(float(row[3]) for row in picture.table.rows) == pytest.approx(slowest * 1000, rel=5e-3)


def test_the_parts_of_ttft_add_up(tmp_path: Path) -> None:
    """Parts, unattributed and what lies outside the server are the mean TTFT of the client, to the rounding."""
    contents = contents_of([few(READ)])
    picture = next(picture for picture in contents.pictures if picture.key == "ttft-parts")
    row = dict(zip(picture.table.columns, picture.table.rows[0], strict=True))
    parts = [float(value) for name, value in row.items() if name.endswith(", ms") and not name.startswith("TTFT")]
    assert sum(parts) == pytest.approx(float(row["TTFT mean, ms"]), rel=0.01)
    assert float(row["before and after the server, ms"]) == pytest.approx(1.5, abs=0.01)  # as the model has it
    assert float(row["unattributed, ms"]) == pytest.approx(0.6, abs=0.01)
    assert [name for name in picture.table.columns if name.startswith("prefill")] == [
        "prefill.hop, ms", "prefill.queue, ms", "prefill.forward, ms",
    ]  # fmt: skip


def test_a_callers_chapter_stands_behind_the_result(tmp_path: Path) -> None:
    """Its sentences, tables and lines are there as text, each table under its heading, before what was measured."""
    table = Table(("ratio", "goodput"), (("WRITE / (b)", "at least 2.10"),))
    chapter = Chapter("All <of> them", ("How it was.",), (("Ratios", table, ("a bound",)), ("Why", None, ("because",))))
    page, structure = page_of([few()], tmp_path, chapters=(chapter,))
    text = " ".join(" ".join(structure.text).split())
    places = [text.index(said) for said in ("All <of> them", "How it was.", "Ratios", "WRITE / (b)", "a bound", "Why")]
    assert places == sorted(places)
    assert text.index("Result: ") < places[0] < places[-1] < text.index("What was measured")
    assert "<caption><span>Ratios</span></caption>" in page
    assert "because" in text
