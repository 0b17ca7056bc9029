"""The published figures that the simulator is held to, as values. Reads their files."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.rpc.errors import ConfigError

CONFIGS = ("standard_1xTP8", "standard_2xTP4", "read_1P1D", "write_1P1D")


@dataclass(frozen=True, slots=True)
class PerRequest:
    """One configuration at 8 requests per second; seconds, in the order of sending."""

    ttft: tuple[float, ...]
    """To the first token."""
    itl: tuple[float, ...]
    """Each request's P99."""
    met_both: int
    """Of these requests, those with TTFT < 1 s and ITL < 50 ms."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A best split."""

    isl: int
    """Prompt tokens."""
    osl: int
    """Answer tokens."""
    hit_rate: float
    """Share of the prompt that is cached."""
    engines: tuple[int, ...]
    """Numbers of engines that the row speaks of."""
    best: tuple[tuple[int, int], ...]
    """(prefill, decode), one or the ends of a range."""


@dataclass(frozen=True, slots=True)
class Published:
    """All of it."""

    rate8: Mapping[str, PerRequest]
    """By configuration."""
    attainment: Mapping[float, Mapping[str, int]]
    """By rate, requests per second, and configuration: percent."""
    ratios: tuple[Ratio, ...]
    """In the order of the file."""
    moai_tokens_per_s: Mapping[str, float]
    """Prompt and answer tokens per second, 1K/8K, 480 in flight, by split such as `1P4D`."""


def default_folder() -> Path:
    """Where a checkout has them."""
    return Path(__file__).resolve().parents[3] / "tests" / "data" / "published"


def load_published(folder: Path | None = None) -> Published:
    """Reads them.

    Raises:
        ConfigError: a file is missing or is not what it should be.
    """
    where = default_folder() if folder is None else folder
    try:
        configs = json.loads((where / "goodput_rate8.json").read_text())["configs"]
        rate8 = {
            name: PerRequest(tuple(one["ttft_s"]), tuple(one["itl_s"]), one["met_both"])
            for name, one in configs.items()
        }
        attainment = {
            float(row["rate"]): {name: int(row[name]) for name in CONFIGS} for row in _rows(where, "slo_attainment.csv")
        }
        ratios = tuple(_ratio(row) for row in _rows(where, "pd_ratio.csv"))
        moai = json.loads((where / "moai.json").read_text())["total_tokens_per_s_1K/8K_con480"]
    except OSError as error:
        raise ConfigError(f"the published figures are in a checkout's tests/data/published: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"published figures in {where}: {type(error).__name__}: {error}") from error
    return Published(rate8, attainment, ratios, {name: float(value) for name, value in moai.items()})


def _rows(where: Path, name: str) -> list[dict[str, str]]:
    lines = (where / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _ratio(row: dict[str, str]) -> Ratio:
    ends = [int(number) for number in row["engines"].split("-")]
    best = []
    for one in row["best"].split(" to "):
        prefill, decode = one.split(":")
        best.append((int(prefill.removesuffix("P")), int(decode.removesuffix("D"))))
    return Ratio(
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        hit_rate=float(row["hit_rate"]),
        engines=tuple(range(ends[0], ends[-1] + 1)),
        best=tuple(best),
    )
