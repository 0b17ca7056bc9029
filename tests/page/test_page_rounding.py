"""The page writes a number as the terminal does; nothing is fake: the page's own module runs in a browser."""

import json
import random

from pdserve.cli import rounding
from tests.page.browser import Page


async def test_page_and_terminal_round_alike(page: Page, url: str) -> None:
    """Whole nanoseconds, ties among them, single and as parts of a whole: the same microseconds from both."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    ns = [
        0,
        499,
        500,
        1500,
        2500,
        609_321_500,
        609_322_500,
        *(dice.randrange(10 ** dice.randrange(1, 12)) for _ in range(300)),
    ]
    ns += [1000 * dice.randrange(10**6) + 500 for _ in range(200)]
    wholes = [[value / 1e9 for value in dice.sample(ns, dice.randrange(1, 15))] for _ in range(200)]
    given = json.dumps([[value / 1e9 for value in ns], wholes])
    await page.goto(f"{url}/#/")
    single, shares, written = await page.run(
        f"import('/format.js').then((format) => {{ const [ns, wholes] = {given}; return [ns.map(format.microseconds),"
        " wholes.map((parts) => format.apportion(parts, parts.reduce((a, b) => a + b, 0))),"
        " ns.map((each) => format.ms(each))]; })"
    )
    assert single == [rounding.microseconds(value / 1e9) for value in ns]
    assert [text.replace(",", "") for text in written] == [rounding.milliseconds(us) for us in single]
    for parts, share in zip(wholes, shares, strict=True):
        total = 0.0
        for part in parts:  # as the page adds them
            total += part
        assert share == rounding.apportioned(parts, total)
