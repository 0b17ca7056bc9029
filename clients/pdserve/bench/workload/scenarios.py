"""The named scenarios: prompt and answer lengths that published measurements use."""

from collections.abc import Mapping

SCENARIOS: Mapping[str, tuple[int, int]] = {
    "1K/1K": (1024, 1024),
    "1K/8K": (1024, 8192),
    "8K/1K": (8192, 1024),
    "8K/8K": (8192, 8192),
    "16K/1K": (16384, 1024),
    "16K/4K": (16384, 4096),
    # Not 2048/1024: the published attainment curves of vLLM's MORI-IO connector are of 2000 in and 1000 out.
    "2K/1K": (2000, 1000),
}
"""Prompt and answer tokens by name."""
