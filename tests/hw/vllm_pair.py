"""Two vLLM engines on one device hand KV over through kvd: `python -m tests.hw.vllm_pair`.

For prompts of 37 to 16,001 tokens, in READ and in WRITE, the tokens of the pair are held to those of an engine without
a connector; then the daemon is replaced by one that copies nothing, under which they must differ. Prints a table;
exits with 1 where a pair's tokens differ or the control's do not.

Decode computes the last token of a prompt by itself, and rounds it as it rounds one token. So does the other engine
when it is asked for the same prompt again and has it in its prefix cache: that answer is the measure, and where the
last token is alone behind a full block (129, 2,001, ...), with kernels that do not depend on what else is in a step
(VLLM_BATCH_INVARIANT), the log probabilities are the same to the last bit. The table has the largest distance of a
token's log probability from that answer, and from the first one, which computed the whole prompt at once.

--ranks 2 splits each engine over two devices, each rank's memory a region of its own. --fast takes vLLM's own choice of
kernels, with which a near tie may fall the other way; --gaps SECONDS measures decode's time between tokens, see
`vllm_gaps`; --unmarked is another negative control: prefill tells of layers without marking them on the device
(`Marking`), so that in WRITE kvd reads them before they are computed.
"""

import argparse
import asyncio
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from pdserve.engine.port import Sampling
from pdserve.engine.vllm.testing_pair import Answer, Handover, KvdOperator, Prompt, ask
from pdserve.kvd.types import Mode
from tests.hw.vllm_gaps import measure
from tests.hw.vllm_rig import Rig, daemon, engines, make_model, unmarked

LENGTHS: Final = (37, 127, 128, 129, 2_001, 8_001, 16_001)
CONTROL: Final = (300, 2_001)
SAMPLING: Final = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=2)
_GRAPHS: Final = '{"backend": "eager", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 40, 48]}'
"""Split and captured, but not compiled: a minute less to start."""
_NOTHING: Final = "tests.hw.kvd_that_copies_nothing"


@dataclass(frozen=True)
class Row:
    """One prompt."""

    mode: Mode
    prompt: Prompt
    cold: Answer
    """One engine's."""
    alone: Answer
    """The same engine's, with the prompt in its prefix cache."""
    both: Handover
    seconds: float

    @property
    def same(self) -> bool:
        """Whether the tokens are those of one engine."""
        return self.both.consumed.tokens == self.alone.tokens

    def line(self) -> str:
        """For the table."""
        facts = self.both.landed.facts
        speed = facts.kv_bytes / facts.copy_ns if facts.copy_ns else 0.0
        landing = (facts.landed_ns - max(facts.accepted_ns, facts.offered_ns)) / 1e6
        cells = (
            *(self.mode.value, f"{len(self.prompt):,}", f"{facts.kv_bytes / 1e6:.0f} MB"),
            *(f"{facts.copy_ns / 1e6:.2f} ms", f"{speed:.0f}", f"{landing:.2f} ms"),
            *(f"{100 * facts.overlapped_bytes / max(1, facts.kv_bytes):.0f} %", f"{self.seconds * 1e3:.0f} ms"),
            *(f"{_far(self.both.consumed, other):.4f}" for other in (self.alone, self.cold)),
            "identical" if self.same else f"DIFFER {self._where()}",
        )
        return f"| {' | '.join(cells)} |"

    def _where(self) -> str:
        """How far apart the two best tokens were for one engine where the answers part."""
        ours, theirs = self.both.consumed.tokens, self.alone.tokens
        at = next(i for i in range(len(theirs)) if ours[: i + 1] != theirs[: i + 1])
        top = [one for output in self.alone.outputs for one in output.logprobs][at].top
        return f"at {at}, best {top[0].logprob:.3f} and {top[1].logprob:.3f}"


_HEAD: Final = (
    "| mode | prompt | KV | copying | GB/s | last of offer and accept to landed | landed before the offer | whole "
    "| off by | off the first answer by | tokens |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def _far(ours: Answer, theirs: Answer) -> float:
    """The largest distance of the two log probabilities of a token, up to where the answers part."""
    both = ([one.sampled for output in answer.outputs for one in output.logprobs] for answer in (ours, theirs))
    same = takewhile(lambda pair: pair[0].token_id == pair[1].token_id, zip(*both, strict=True))
    return max((abs(our.logprob - their.logprob) for our, their in same), default=math.inf)


async def compare(rig: Rig, mode: Mode, length: int, source: random.Random) -> Row:
    """One new prompt by all ways."""
    prompt = tuple(source.randrange(256) for _ in range(length))
    cold, alone = [await ask(rig.solo, prompt, SAMPLING) for _ in range(2)]
    began = time.perf_counter()
    both = await rig.pair.hand_over(mode, prompt, SAMPLING)
    return Row(mode, prompt, cold, alone, both, time.perf_counter() - began)


async def table(rig: Rig, lengths: tuple[int, ...], source: random.Random) -> list[Row]:
    """Each length in each mode; the first prompts, which load kernels, are not counted."""
    for mode in Mode:
        await compare(rig, mode, 3_000, source)
    rows = []
    print(_HEAD, flush=True)
    for mode in Mode:
        for length in lengths:
            rows.append(await compare(rig, mode, length, source))
            print(rows[-1].line(), flush=True)
    await rig.pair.idle()
    return rows


async def run(seed: int, ranks: int, gaps: float, more: Sequence[str]) -> bool:
    """Whether all was as it must be. `ranks`: of each engine; `more`: vLLM's arguments."""
    source = random.Random(seed)
    print(f"seed {seed}, {ranks} ranks an engine", flush=True)
    with tempfile.TemporaryDirectory(prefix="pdhw") as name:
        folder = Path(name)
        kvd = KvdOperator(str(folder / "kvd.sock"))
        async with asyncio.timeout(900):
            model = await asyncio.to_thread(make_model, folder / "model")
            began = time.perf_counter()
            async with daemon(folder, kvd) as first, engines(model, folder, kvd, *more, ranks=ranks) as rig:
                print(f"three engines after {time.perf_counter() - began:.0f} s", flush=True)
                rows = await table(rig, LENGTHS, source)
                await first.end()
                async with rig.other_kvd(module=_NOTHING):
                    print("\na kvd that copies nothing:", flush=True)
                    control = [await compare(rig, mode, n, source) for mode in Mode for n in CONTROL]
                    for row in control:
                        print(row.line(), flush=True)
                if gaps:
                    await measure(rig, gaps, source, _NOTHING)
        await kvd.aclose()
    wrong, blind = sum(not row.same for row in rows), sum(row.same for row in control)
    print(f"\n{len(rows)} hand-overs, {wrong} with other tokens; {blind} of {len(control)} controls saw nothing")
    return not wrong and not blind


async def run_unmarked(seed: int, ranks: int, more: Sequence[str]) -> bool:
    """Whether layers that are told of too early show in WRITE, and only there."""
    source = random.Random(seed)
    print(f"seed {seed}, layers are not marked\n{_HEAD}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pdhw") as name:
        folder = Path(name)
        kvd = KvdOperator(str(folder / "kvd.sock"))
        async with asyncio.timeout(600):
            model = await asyncio.to_thread(make_model, folder / "model")
            async with daemon(folder, kvd), engines(model, folder, kvd, *more, ranks=ranks, prepare=unmarked) as rig:
                rows = [await compare(rig, mode, 8_001, source) for mode in (Mode.WRITE, Mode.READ, Mode.WRITE)]
        await kvd.aclose()
    for row in rows:
        print(row.line(), flush=True)
    return [row.same for row in rows] == [False, True, False]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--ranks", type=int, default=1, help="of each engine, each on a device of its own (1)")
    parser.add_argument("--gaps", type=float, default=0.0, help="seconds of each measurement; 0: none")
    parser.add_argument("--fast", action="store_true", help="vLLM's own choice of kernels")
    parser.add_argument("--unmarked", action="store_true", help="the negative control of the marks, alone")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs between the attention layers")
    args = parser.parse_args()
    os.environ["VLLM_BATCH_INVARIANT"] = "0" if args.fast else "1"
    more = ("--dtype", "float16", *(("--compilation-config", _GRAPHS) if args.graphs else ("--enforce-eager",)))
    good = asyncio.run(
        run_unmarked(args.seed, args.ranks, more) if args.unmarked else run(args.seed, args.ranks, args.gaps, more)
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
