"""What a comparison keeps, and how it goes on from there."""

import dataclasses
import json
from pathlib import Path

import pytest

from pdserve.bench.compare.budget import Trial
from pdserve.bench.compare.folder import FILE, Cell, Share, opened
from pdserve.bench.compare.objectives import Sample, calibrated, slo_of
from pdserve.rpc.errors import ConfigError
from tests.unit.bench.bench_compare_examples import MACHINE, results, run, settings

CELL = Cell("d", 1, 3, "2026-01-01T00:00:00Z", 20.0, ("pdserve", "up"), (Share(1.0, 2.0, {"proxy": 0.1}),))


def test_everything_comes_back(tmp_path: Path) -> None:
    """Calibration, objectives, trials, budget and cells of an interrupted comparison are there in the next one."""
    found = calibrated((Sample(1.0, (0.1, 0.2)),), 8)
    document = results([run(1.0, 9, 10)])
    with opened(tmp_path / "new", settings(), MACHINE) as folder:
        folder.keep(calibration=found, slo=slo_of(found))
        folder.keep(trials=(Trial(32, 0.5, 0.75),), budget=32)
        folder.add(CELL, document)
    with opened(tmp_path / "new", settings(), MACHINE) as folder:
        state = folder.state
        assert (state.calibration, state.slo, state.budget) == (found, slo_of(found), 32)
        assert state.trials == (Trial(32, 0.5, 0.75),)
        assert state.cells == (CELL,)
        assert folder.find("d", 1) == CELL
        assert folder.find("d", 0) is None
        assert folder.results(CELL) == document
        assert (folder.path / "d-1.csv").exists()


def test_a_cell_without_its_results_is_measured_again(tmp_path: Path) -> None:
    """A file that somebody removed is not counted as measured, and its cell does not come twice after."""
    with opened(tmp_path, settings(), MACHINE) as folder:
        folder.add(CELL, results([run(1.0, 9, 10)]))
        folder.add(dataclasses.replace(CELL, repeat=0), results([run(1.0, 9, 10)]))
        (tmp_path / "d-1.json").unlink()
        assert folder.find("d", 1) is None
        assert [cell.repeat for cell in folder.whole()] == [0]
        folder.add(dataclasses.replace(CELL, order=4), results([run(1.0, 8, 10)]))
        assert [(cell.repeat, cell.order) for cell in folder.whole()] == [(0, 3), (1, 4)]


def test_a_partial_cell_is_kept_and_not_counted(tmp_path: Path) -> None:
    """It goes when the whole one comes."""
    with opened(tmp_path, settings(), MACHINE) as folder:
        folder.add_partial("d", 1, results([run(1.0, 9, 10, partial=True)], partial=True))
        assert folder.find("d", 1) is None
        assert (tmp_path / "d-1.partial.json").exists()
        folder.add(CELL, results([run(1.0, 9, 10)]))
        assert not (tmp_path / "d-1.partial.json").exists()


def test_other_settings_do_not_go_into_the_same_folder(tmp_path: Path) -> None:
    """What differs is named; nothing is overwritten."""
    with opened(tmp_path, settings(), MACHINE) as folder:
        folder.write()
    before = (tmp_path / FILE).read_bytes()
    with (
        pytest.raises(ConfigError, match=r"seed: 0 there, 5 asked"),
        opened(tmp_path, settings(seed=5), MACHINE),
    ):
        pass
    assert (tmp_path / FILE).read_bytes() == before


def test_another_machine_does_not_go_on(tmp_path: Path) -> None:
    """Objectives of one machine say nothing on another."""
    with opened(tmp_path, settings(), MACHINE) as folder:
        folder.write()
    with (
        pytest.raises(ConfigError, match="another machine"),
        opened(tmp_path, settings(), dataclasses.replace(MACHINE, cores=64)),
    ):
        pass


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    """They would share the cores too."""
    with (
        opened(tmp_path, settings(), MACHINE),
        pytest.raises(ConfigError, match="a comparison runs in"),
        opened(tmp_path, settings(), MACHINE),
    ):
        pass


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": "pdserve.compare/9"}', '{"schema": "pdserve.compare/1"}'])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, text: str) -> None:
    """With its name, not with a traceback."""
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=FILE), opened(tmp_path, settings(), MACHINE):
        pass


def test_what_follows_is_written_beside_and_not_read_back(tmp_path: Path) -> None:
    """Curves and ratios are for readers; the state is what counts."""
    with opened(tmp_path, settings(), MACHINE) as folder:
        folder.write(ratios=[{"over": "d"}])
    assert json.loads((tmp_path / FILE).read_text())["ratios"] == [{"over": "d"}]
    with opened(tmp_path, settings(), MACHINE) as folder:
        assert folder.state.cells == ()
