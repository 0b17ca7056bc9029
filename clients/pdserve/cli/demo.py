"""`pdserve demo`: a prefill and decode pair answers what a single engine answers, and every promise is checked.

1. Three engines start side by side: a prefill and a decode engine behind kvd, and one engine by itself.
2. A short request goes each way first and is not counted: what is done once is not in the times of the answers.
   Then each question goes to the single engine (route colocated), then to the pair, in READ and in WRITE, greedy.
3. Tokens, recomputed prompt tokens, fallbacks and bytes are compared with what they must be.
4. The trace of an answer in each mode says the same time to first token as the answer.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli import extras, options
from pdserve.rpc.errors import ConfigError, PdserveError

if TYPE_CHECKING:
    from pdserve.cli.board import Board
    from pdserve.cli.demo_check import Answer, Geometry
    from pdserve.cli.demo_questions import Question
    from pdserve.cli.plan import Plan, Ports, Spec
    from pdserve.client import AsyncClient, Completion

TAKES_REST = True
MAX_TOKENS = 24
BLOCK_SIZE = 32
"""Tokens per block: the smallest that vLLM takes on CPU, so that a page of text has several."""
_VLLM_ARGS = (
    *("--block-size", str(BLOCK_SIZE)),
    *("--dtype", "float32"),
    *("--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", str(256 << 20)),  # room for five such prompts, not all of the machine
)
_WAYS: tuple[dict[str, Any], ...] = (
    {"route": "colocated"},
    {"route": "split", "mode": "read"},
    {"route": "split", "mode": "write"},
)
"""A first use of each engine, of kvd's sessions and of both modes."""
_SIM_LAYERS, _SIM_BLOCK_BYTES = 8, 16 * 1024
_SIM_ARGS = (
    *("--sim-block-size", str(BLOCK_SIZE)),
    *("--sim-layers", str(_SIM_LAYERS)),
    *("--sim-block-bytes", str(_SIM_BLOCK_BYTES)),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the engine, the model and the deadline."""
    parser.epilog = "What follows `--` goes to every engine."
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm")
    parser.add_argument("--model", default="smollm2-135m", help="folder, or smollm2-135m, which is fetched; default")
    parser.add_argument("--start-timeout", type=options.seconds, default=300.0, metavar="S", help="default 300 s")
    parser.add_argument("--no-traces", action="store_true", help="keep and show no traces of requests")
    parser.add_argument("--timeout", type=options.seconds, default=120.0, metavar="S", help="per answer; default 120 s")


def run(args: argparse.Namespace) -> int:
    """Runs the demo in a fresh folder; 0 only if every answer keeps every promise. Its traces outlive the folder."""
    extras.check_services("demo", args.engine)
    from pdserve.cli import deployment, kept, model
    from pdserve.cli.board import Board
    from pdserve.cli.plan import TRACES_FILE, Spec, engine_names
    from pdserve.cli.up import traces_go_to

    board = Board(sys.stdout, terminal=sys.stdout.isatty())
    if args.engine == "vllm":
        board.say(f"1. the model: {args.model}")
        folder, name = model.resolve(args.model)
        board.say(f"   {folder}")
    else:
        folder, name = "", "sim"
        board.say("1. no model: the simulated engine computes bytes that follow from the prompt")
    spec = Spec(
        engine=args.engine,
        model=folder,
        served_name=name,
        both=1,
        on_failure="fail",
        pin=True,
        traces=not args.no_traces and not traces_go_to(os.environ),
        engine_args=(*(_VLLM_ARGS if args.engine == "vllm" else _SIM_ARGS), *args.rest),
    )
    # A short path of our own, so that a deployment that runs already is not disturbed.
    scratch = Path(tempfile.mkdtemp(prefix="pdserve-demo-", dir="/tmp"))
    status = 1
    try:
        with (
            deployment.claimed(scratch) as state_dir,
            deployment.free_ports(len(engine_names(spec)), 0, 0) as ports,
        ):
            status = asyncio.run(_demo(spec, state_dir, args, board, ports))
    finally:
        try:
            kept.keep(scratch / TRACES_FILE)
        except (PdserveError, OSError) as error:
            board.say(f"the traces are not kept: {error}")
        if status:
            board.say(f"logs are kept in {scratch / 'logs'}")
        else:
            shutil.rmtree(scratch)
    if not status:
        board.say(_next(traced=spec.traces))
    return status


def _next(*, traced: bool) -> str:
    """What to try after the demo."""
    if not traced:
        return "The parts are explained in docs/reading-a-trace.md. Next:\npdserve up"
    next_ = "Next, where the time of the last answer went:"
    return f"The parts are explained in docs/reading-a-trace.md. {next_}\npdserve trace --last"


async def _demo(spec: "Spec", state_dir: Path, args: argparse.Namespace, board: "Board", ports: "Ports") -> int:
    from pdserve.cli import demo_check, deployment, plan
    from pdserve.cli.fleet import Fleet
    from pdserve.cli.stopping import Stop

    made = plan.make_plan(spec, state_dir, ports, sys.executable, deployment.usable_cores())
    kept = ", a trace store" if made.traces else ""
    what = f"kvd, the pair, a single engine to compare with{kept}, the proxy"
    board.say(f"2. starting {len(made.processes)} processes: {what}")
    answers: list[Answer] = []
    faults: list[str] = []
    fleet = Fleet(made, board, grace=10.0)
    stop = Stop(fleet.hurry.set)
    async with fleet:
        if not await stop.unless(fleet.start(args.start_timeout)):
            return 130
        board.leave()
        if not await stop.unless(fleet.unless_one_dies(_ask_all(made, args.timeout, board, answers, faults))):
            return 130
        if made.traces:
            board.say(f"4. where the time of an answer in each mode went; until the end also at {made.traces}")
            if not await stop.unless(fleet.unless_one_dies(_show_traces(made, board, answers, faults))):
                return 130
        board.say("5. stopping" if made.traces else "4. stopping")
    board.leave()
    board.say(f"\n{demo_check.answers_table(answers)}\n\n{demo_check.parts_table(answers)}\n")
    board.say(
        "alone ms: TTFT of the single engine. KV bytes: whole blocks. GB/s: bytes over the time spent copying them.\n"
    )
    for fault in faults:
        board.say(f"WRONG: {fault}")
    board.say(demo_check.verdict(answers))
    return 1 if faults else 0


async def _ask_all(made: "Plan", timeout: float, board: "Board", answers: "list[Answer]", faults: list[str]) -> None:
    """Asks every question of the single engine and of the pair; adds the answers and what is wrong with them."""
    from pdserve.cli import demo_check, text
    from pdserve.cli.demo_questions import QUESTIONS
    from pdserve.client import AsyncClient, Retry

    geometry = await _geometry(made)
    board.say(f"3. {len(QUESTIONS)} questions, greedy, {MAX_TOKENS} tokens: the single engine first, then the pair")
    # Once: what has to be asked again does not keep the demo's promise.
    async with AsyncClient(made.grpc, timeout=timeout, retry=Retry(attempts=1)) as client:
        for fields in _WAYS:
            await client.generate("Hello", max_tokens=2, temperature=0.0, on_failure="fail", **fields)
        board.say("   each way was used once before, uncounted: first uses take longer")
        for number, question in enumerate(QUESTIONS, 1):
            alone = await _ask(client, question, route="colocated")
            split = await _ask(client, question, route="split", mode=question.mode)
            answer = demo_check.Answer(question.name, question.mode, alone, split)
            answers.append(answer)
            wrong = demo_check.faults(answer, geometry)
            faults += [f"{question.name} {question.mode}: {fault}" for fault in wrong]
            board.say(f"   {number}. {question.name}, {question.mode}: {split.text!r}")
            board.say(f"      {text.summary(split)}: {'; '.join(wrong) or 'as it must be'}")


async def _show_traces(made: "Plan", board: "Board", answers: "list[Answer]", faults: list[str]) -> None:
    from pdserve.cli import demo_traces

    faults += await demo_traces.show(made.traces, answers, board)


async def _ask(client: "AsyncClient", question: "Question", **fields: Any) -> "Completion":
    from pdserve.client import Message

    fields |= {"max_tokens": MAX_TOKENS, "temperature": 0.0, "on_failure": "fail"}
    if question.system:
        return await client.chat([Message("system", question.system), Message("user", question.text)], **fields)
    return await client.generate(question.text, **fields)


async def _geometry(made: "Plan") -> "Geometry":
    """The KV cache of the model, from its config.json, or of the sim engine, from the shape that we asked for.

    Raises:
        ConfigError: the memory that kvd holds has another shape.
    """
    from pdserve.cli import demo_check, probe

    if made.spec.engine == "sim":
        expected = demo_check.Geometry(BLOCK_SIZE, _SIM_LAYERS, _SIM_BLOCK_BYTES)
    else:
        config = json.loads((Path(made.spec.model) / "config.json").read_text())
        expected = demo_check.geometry(config, BLOCK_SIZE)
    want = expected.layers * expected.layer_block_bytes
    for region in (await probe.describe_kvd(made.kvd)).regions:
        if region.bytes // region.num_blocks != want:
            raise ConfigError(f"kvd has {region.bytes // region.num_blocks} bytes per block, {want} were expected")
    return expected
