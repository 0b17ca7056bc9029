"""How the shipped profiles' constants are found out of the published figures. Deterministic; `validate --fit` runs it.

MI300X: from the per-request figures at 8 requests per second, and from nothing else: no other rate is
looked at. MI325X: one constant, from the first two rows of the published ratios. MoAI: two constants,
from two figures. What is looked at is an argument of each function.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pdserve.bench.slo import Slo
from pdserve.bench.workload.arrivals import like_vllm
from pdserve.costmodel import CostModel
from pdserve.planner.fitting import Found, minimise
from pdserve.planner.profile import Profile, RoleProfile
from pdserve.planner.published import PerRequest, Ratio
from pdserve.planner.ratio import splits
from pdserve.planner.simulator import EngineSpec, Fleet, Handover, Job, Mode, Outcome, Role, Routing, simulate, split
from pdserve.rpc.errors import ConfigError

RATE = 8.0
JOBS = (Job(2000, 1000),) * 100
"""The published run: 100 requests, 2000 tokens in, 1000 out."""
BUDGETS = (4096, 8192, 16384)
"""Token budgets that are tried."""
COLOCATED_BUDGET = 8192
"""The colocated engines'; their published P99 ITL show up to four prompts in a step."""
SEED = 0
GENERATIONS = 100
POPULATION = 48

KV_BYTES = 192_512
"""Qwen3-235B-A22B's config: 94 layers x 2 x 4 KV heads x 128 x 2 bytes."""
KV_LAYERS = 94
"""The same."""
KV_TP4, KV_TP8 = 2_300_000, 5_900_000
"""Estimates: 0.9 x accelerators x 192 GB, less 240 GB for weights and the rest, over KV_BYTES."""
MAX_SEQS = 1024
"""Beyond what any published run had: the data show no cap."""

RATIO_SLO = Slo(ttft=5.0, itl=0.05)
"""The ratios' post names no SLO: about five times the TTFT of a lone 16K prompt on `mi300x`; the other's ITL."""
RATIO_REQUESTS = 600
"""So many that the busiest engine is at its steady batch long before the last arrives."""


def misfit(outcome: Outcome, published: PerRequest) -> float:
    """Mean |ln(simulated / published)| of the requests' TTFT plus the same of their P99 ITL, request by request."""
    ttft = np.log([one.ttft for one in outcome.served]) - np.log(published.ttft)
    itl = np.log([one.itl_p99 for one in outcome.served]) - np.log(published.itl)
    return float(np.abs(ttft).mean() + np.abs(itl).mean())


def _arrivals() -> list[float]:
    return like_vllm(RATE, 1.0, len(JOBS), 0)


# -- MI300X, four accelerators an engine: 1P1D and two colocated ones --------------------------

TP4_NAMES = (
    "prefill_base", "prefill_per_token", "decode_base", "decode_per_seq", "mixed_base", "mixed_per_token",
    "serialization", "tail", "bandwidth", "dispatch", "token_budget",
)  # fmt: skip
TP4_BOUNDS = (
    (0.0, 0.1), (0.03e-3, 0.07e-3), (0.005, 0.035), (0.0, 0.3e-3), (0.0, 0.1), (0.02e-3, 0.08e-3),
    (0.0, 0.06), (0.0, 0.08), (20e9, 400e9), (0.0, 0.05), (0.0, float(len(BUDGETS))),
)  # fmt: skip


def tp4_fleet(values: Sequence[float], mode: Mode) -> Fleet:
    """1P1D or two colocated engines with these values, in the order of TP4_NAMES; `token_budget`, that of
    1P1D, is a place in BUDGETS."""
    *costs, serialization, tail, bandwidth, dispatch, place = values
    prefill_base, per_token, base, per_seq, mixed_base, mixed_per_token = costs
    cost = CostModel(prefill_base, per_token, base, per_seq, 0.0, mixed_base, mixed_per_token)
    engine = EngineSpec(cost, budget_at(place), MAX_SEQS, KV_TP4)
    return Fleet(
        roles=(Role.BOTH,) * 2 if mode is Mode.COLOCATED else split(1, 1),
        mode=mode,
        prefill=engine,
        decode=engine,
        both=EngineSpec(cost, COLOCATED_BUDGET, MAX_SEQS, KV_TP4),
        handover=Handover(serialization, tail, bytes_per_token=KV_BYTES, bandwidth=bandwidth, layers=KV_LAYERS),
        dispatch=dispatch,
        routing=Routing.ROUND_ROBIN,
    )


def budget_at(place: float) -> int:
    """The token budget at a place in BUDGETS."""
    return BUDGETS[min(int(place), len(BUDGETS) - 1)]


def fit_tp4(read: PerRequest, write: PerRequest, colocated: PerRequest, *, generations: int = GENERATIONS) -> Found:
    """One set of constants for the three configurations whose engines have four accelerators each.

    They share the engine's decode line: the split shows it at a hundred sequences, the pair at fifty.
    """
    arrivals = _arrivals()
    pairs = ((Mode.READ, read), (Mode.WRITE, write), (Mode.COLOCATED, colocated))

    def objective(values: tuple[float, ...]) -> float:
        return sum(misfit(simulate(tp4_fleet(values, mode), JOBS, arrivals), one) for mode, one in pairs)

    return minimise(objective, TP4_BOUNDS, seed=SEED, generations=generations, population=POPULATION)


# -- MI300X, eight accelerators an engine -----------------------------------------------------

TP8_NAMES = ("decode_base", "decode_per_seq", "mixed_base", "mixed_per_token")
TP8_BOUNDS = TP4_BOUNDS[2:6]


def tp8_cost(values: Sequence[float]) -> CostModel:
    """A prompt alone costs a step's base and what it adds to a step: one request in a hundred meets that case."""
    base, per_seq, mixed_base, mixed_per_token = values
    return CostModel(base + mixed_base, mixed_per_token, base, per_seq, 0.0, mixed_base, mixed_per_token)


def tp8_fleet(values: Sequence[float], dispatch: float) -> Fleet:
    """One colocated engine with these values, in the order of TP8_NAMES."""
    engine = EngineSpec(tp8_cost(values), COLOCATED_BUDGET, MAX_SEQS, KV_TP8)
    return Fleet((Role.BOTH,), Mode.COLOCATED, both=engine, dispatch=dispatch, routing=Routing.ROUND_ROBIN)


def fit_tp8(published: PerRequest, dispatch: float, *, generations: int = GENERATIONS) -> Found:
    """Constants of the one large engine. `dispatch` is that of `fit_tp4`: before the engines all is the same."""
    arrivals = _arrivals()

    def objective(values: tuple[float, ...]) -> float:
        return misfit(simulate(tp8_fleet(values, dispatch), JOBS, arrivals), published)

    return minimise(objective, TP8_BOUNDS, seed=SEED, generations=generations, population=POPULATION)


# -- MoAI -----------------------------------------------------------------------------------


def fit_moai(
    tokens_per_s: dict[str, float], *, isl: int = 1024, osl: int = 8192, concurrency: int = 480
) -> tuple[float, float]:
    """(decode_base, decode_per_seq), seconds, from two splits' throughput.

    While C requests are in flight on D decode engines each step makes C tokens, so it takes
    C * (1 + isl / osl) / (prompt and answer tokens per second); two splits give the line over C / D.

    Raises:
        ConfigError: not exactly two splits, or with equally many decode engines.
    """
    points = [
        (concurrency / int(name.split("P")[1].removesuffix("D")), concurrency * (1 + isl / osl) / rate)
        for name, rate in sorted(tokens_per_s.items())
    ]
    if len(points) != 2 or points[0][0] == points[1][0]:
        raise ConfigError("two splits with different numbers of decode engines are needed")
    (few, short), (many, long) = points
    per_seq = (long - short) / (many - few)
    return round(short - per_seq * few, 5), round(per_seq, 8)


# -- MI325X ---------------------------------------------------------------------------------


def row_job(row: Ratio) -> Job:
    """A request of that row."""
    return Job(row.isl, row.osl, hit=int(row.isl * row.hit_rate))


def row_agrees(profile: Profile, row: Ratio) -> tuple[bool, list[str]]:
    """Whether the best split is the published one, for each number of engines that the row speaks of (a
    range of splits: one of it for each); and the best splits found."""
    best = [
        splits(profile, row_job(row), RATIO_SLO, engines, mode=Mode.READ, requests=RATIO_REQUESTS)[0]
        for engines in row.engines
    ]
    return all((one.prefills, one.decodes) in row.best for one in best), [one.label for one in best]


RATIO_FACTORS = tuple(2 ** (k / 2) for k in range(-6, 5))
"""Of the starting price: what is tried first."""


def fit_ratio(start: Profile, rows: Sequence[Ratio], *, precision: float = 0.05) -> tuple[float, float, float]:
    """(prefill_per_token, lowest, highest), seconds: the middle, in ratio, of the range of prices at which
    the best split is the published one in all `rows`; other constants are `start`'s.

    Raises:
        ConfigError: no price that is tried agrees with the rows, or those that do are no range.
    """
    if start.prefill is None:
        raise ConfigError("a profile with a prefill engine is needed")
    centre = start.prefill.spec.cost.prefill_per_token

    def agrees(per_token: float) -> bool:
        return all(row_agrees(with_prefill(start, per_token), row)[0] for row in rows)

    tried = [(centre * factor, agrees(centre * factor)) for factor in RATIO_FACTORS]
    good = [i for i, (_, agreed) in enumerate(tried) if agreed]
    if not good or good != list(range(good[0], good[-1] + 1)):
        raise ConfigError(
            f"the best splits are the published ones at {[tried[i][0] for i in good]} s a token: no range"
        )
    low, high = tried[good[0]][0], tried[good[-1]][0]
    if good[0] > 0:
        low = _edge(agrees, low, tried[good[0] - 1][0], precision)
    if good[-1] < len(tried) - 1:
        high = _edge(agrees, high, tried[good[-1] + 1][0], precision)
    return float(f"{math.sqrt(low * high):.3g}"), low, high


def with_prefill(profile: Profile, per_token: float) -> Profile:
    """The profile with another price of a prompt token on prefill engines."""
    role = profile.prefill
    if role is None:
        raise ConfigError("a profile with a prefill engine is needed")
    cost = replace(role.spec.cost, prefill_per_token=per_token)
    return replace(profile, prefill=RoleProfile(replace(role.spec, cost=cost), role.accelerators, role.source))


def _edge(agrees: Callable[[float], bool], inside: float, outside: float, precision: float) -> float:
    """The last price that agrees on the way from `inside` to `outside`."""
    while abs(math.log(outside / inside)) > precision:
        middle = math.sqrt(inside * outside)
        inside, outside = (middle, outside) if agrees(middle) else (inside, middle)
    return inside
