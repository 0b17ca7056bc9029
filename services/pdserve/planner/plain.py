"""How numbers are written for people. Pure."""

from decimal import Decimal


def number(value: float, digits: int = 3) -> str:
    """Of so many digits and without an exponent, such as `2,750` or `0.0042`; a whole number has all of its digits."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{Decimal(f'{value:.{digits}g}'):,f}"


def seconds(value: float) -> str:
    """Of three digits, in ms below 1 s."""
    return f"{number(float(f'{value * 1000:.3g}'))} ms" if value < 0.9995 else f"{number(float(f'{value:.3g}'))} s"
