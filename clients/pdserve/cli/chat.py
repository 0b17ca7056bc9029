"""`pdserve chat`: a conversation at the terminal, streamed."""

import argparse
import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from pdserve.cli import options
from pdserve.rpc.errors import PdserveError

if TYPE_CHECKING:
    from pdserve.client import Client, Message

HELP = "/clear forgets the conversation, /facts shows the last answer's, /quit or Ctrl-D leaves; Ctrl-C stops an answer"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the system prompt and the call's options."""
    parser.add_argument("--system", default="", help="what the model is told before the conversation")
    options.add_target(parser)
    options.add_call(parser)


def run(args: argparse.Namespace) -> int:
    """Talks until /quit or the end of input; an answer that fails does not end the conversation."""
    with options.client(args) as client:
        Conversation(client, args.system, options.call_fields(args)).run()
    return 0


class Conversation:
    """What has been said so far, and the loop that goes on with it."""

    def __init__(self, client: "Client", system: str, fields: dict[str, Any]) -> None:
        self._client = client
        self._system = system
        self._fields = fields
        self._turns: list[Message] = []
        self._facts = "nothing has been answered yet"

    def run(self) -> None:
        """Reads a line, answers it, again."""
        # Without a terminal, stdin is a script: its lines are prompts and nothing else is printed.
        terminal = sys.stdin.isatty()
        if terminal:
            with contextlib.suppress(ImportError):  # line editing, where Python was built with it
                importlib.import_module("readline")
            print(HELP)
        while True:
            try:
                line = input("> " if terminal else "").strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                print()
                continue
            match line:
                case "":
                    continue
                case "/quit":
                    break
                case "/clear":
                    self._turns.clear()
                case "/facts":
                    print(self._facts)
                case _ if line.startswith("/"):
                    print(HELP)
                case _:
                    self._answer(line)

    def _answer(self, line: str) -> None:
        from pdserve.cli import text
        from pdserve.client import Message

        asked = [*self._turns, Message("user", line)]
        messages = [Message("system", self._system), *asked] if self._system else asked
        said: list[str] = []
        try:
            with self._client.stream_chat(messages, **self._fields) as stream:
                for delta in stream:
                    said.append(delta.text)
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                self._facts = text.summary(stream.completion())
        except KeyboardInterrupt:
            self._facts = "the last answer was stopped"
        except PdserveError as error:
            # The question is not kept: asking it again is one key away.
            begun = "\n" if any(said) else ""
            print(f"{begun}pdserve: {error.message} ({error.reason})", file=sys.stderr)
            return
        print()
        self._turns = [*asked, Message("assistant", "".join(said))]
