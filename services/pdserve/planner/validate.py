"""Prints published figures against simulated ones.

    python -m pdserve.planner.validate [--data DIR] [--fit]

`--fit` first finds the shipped profiles' constants again, which takes some minutes, and prints them beside
what is stored. Exits with 1 where a line that is held is missed, or a constant is not found again.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from pdserve.planner import fit
from pdserve.planner.held import Line, everything
from pdserve.planner.profile import Profile, RoleProfile
from pdserve.planner.profile_file import load, shipped
from pdserve.planner.published import Published, load_published
from pdserve.rpc.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="pdserve.planner.validate", description="published against simulated")
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the published figures (default: the checkout's)"
    )
    parser.add_argument("--fit", action="store_true", help="find the profiles' constants again first")
    arguments = parser.parse_args(argv)
    try:
        published = load_published(arguments.data)
        profiles = {name: load(name) for name in shipped()}
        missed = 0
        if arguments.fit:
            for line in fitted_again(profiles, published):
                missed += not line.held
                _say(f"  {row(line)}")
        for title, lines in everything(profiles, published).items():
            _say(f"\n{title}")
            for line in lines():
                missed += not line.held
                _say(f"  {row(line)}")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    _say(f"\n{missed} missed" if missed else "\nall lines hold")
    return 1 if missed else 0


def row(line: Line) -> str:
    """One line of the table."""
    verdict = "" if not line.bound else "  ok" if line.held else "  MISSED"
    bound = f"[{line.bound}]" if line.bound else ""
    return f"{line.name:44} {line.published:>16} {line.simulated:>16} {line.error:>10}  {bound}{verdict}".rstrip()


def fitted_again(profiles: Mapping[str, Profile], published: Published) -> Iterator[Line]:
    """Each fitted constant as stored and as found now."""
    mi300x, rate8 = profiles["mi300x"], published.rate8
    tp4 = fit.fit_tp4(rate8["read_1P1D"], rate8["write_1P1D"], rate8["standard_2xTP4"])
    found = dict(zip(fit.TP4_NAMES, tp4.values, strict=True))
    found["token_budget"] = fit.budget_at(found["token_budget"])
    yield from _compare("mi300x", tp4_constants(mi300x), found)
    tp8 = fit.fit_tp8(rate8["standard_1xTP8"], found["dispatch"])
    cost = asdict(_role(profiles["mi300x-tp8"].colocated).spec.cost)
    stored = {name: cost[name] for name in fit.TP8_NAMES}
    yield from _compare("mi300x-tp8", stored, dict(zip(fit.TP8_NAMES, tp8.values, strict=True)))
    base, per_seq = fit.fit_moai(dict(published.moai_tokens_per_s))
    cost = asdict(_role(profiles["moai"].decode).spec.cost)
    stored = {name: cost[name] for name in ("decode_base", "decode_per_seq")}
    yield from _compare("moai", stored, {"decode_base": base, "decode_per_seq": per_seq})
    prefill = _role(profiles["mi325x"].prefill).spec.cost.prefill_per_token
    start = fit.with_prefill(profiles["mi325x"], _role(mi300x.prefill).spec.cost.prefill_per_token)
    middle, low, high = fit.fit_ratio(start, published.ratios[:2])
    found_ratio = {f"prefill_per_token, of {low:.3g} to {high:.3g}": middle}
    yield from _compare("mi325x", {next(iter(found_ratio)): prefill}, found_ratio)


def tp4_constants(profile: Profile) -> dict[str, float]:
    """The constants that a profile holds, by the names of the fit."""
    engine = _role(profile.prefill).spec
    cost, handover = asdict(engine.cost), asdict(profile.handover)
    held = {**cost, **handover, "dispatch": profile.dispatch, "token_budget": engine.token_budget}
    return {name: held[name] for name in fit.TP4_NAMES}


def _role(role: RoleProfile | None) -> RoleProfile:
    if role is None:
        raise ConfigError("a shipped profile lacks a role")
    return role


def _compare(name: str, stored: Mapping[str, float], found: Mapping[str, float]) -> Iterator[Line]:
    for key, value in stored.items():
        again = found[key]
        yield Line(
            f"{name}: {key}", f"{value:.4g}", f"{again:.4g}", "", "equal", abs(value - again) <= 1e-6 * abs(value)
        )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
