"""The tokenizers of all models: loaded when a model first registers, kept, run off the event loop.

A short prompt takes less time than a thread switch and is tokenised in place.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from pdserve.proxy.tokenizing.hf import HfTokenizer
from pdserve.proxy.tokenizing.plain import BytesTokenizer
from pdserve.proxy.tokenizing.port import Tokenizer
from pdserve.proxy.types import Chat, Prompt, TokenIds
from pdserve.rpc.errors import ConfigError, DeadlinePassed, EmptyPrompt, PdserveError, Unavailable

log = structlog.get_logger(__name__)

IN_PLACE = 2048
"""Characters of the longest prompt that is tokenised on the event loop: about half a millisecond."""

Load = Callable[[str], Tokenizer]
"""Makes a tokenizer of what an engine announced; blocking."""


def load(name: str) -> Tokenizer:
    """The tokenizer of a folder, or of "bytes".

    Raises:
        ConfigError: the folder is not there or holds none.
    """
    return BytesTokenizer() if name == "bytes" else HfTokenizer.load(Path(name))


class Shelf:
    """Tokenizers by model."""

    def __init__(
        self,
        overrides: Mapping[str, str],
        load: Load = load,
        threads: int = 2,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`overrides`: folders by model, instead of what engines announce; `changed`: called on the loop when what
        `lacking` says may be something else."""
        self._overrides = dict(overrides)
        self._load = load
        self._changed = changed
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._loading: dict[tuple[str, str], asyncio.Future[Tokenizer]] = {}
        self._of_model: dict[str, asyncio.Future[Tokenizer]] = {}

    def announce(self, model: str, tokenizer: str) -> None:
        """A model is served with this tokenizer: begins to load it, where that is not done. The
        last announced wins; one that failed is tried again."""
        key = (model, self._overrides.get(model, tokenizer))
        kept = self._loading.get(key)
        failed = kept is not None and kept.done() and not kept.cancelled() and kept.exception() is not None
        if kept is None or failed:
            kept = asyncio.get_running_loop().run_in_executor(self._pool, self._load, key[1])
            kept.add_done_callback(lambda done: self._loaded(done, *key))
            self._loading[key] = kept
        self._of_model[model] = kept

    def lacking(self, model: str) -> str:
        """Why a text of this model could not be tokenised now; empty: it could."""
        loading = self._of_model.get(model)
        if loading is None or loading.cancelled():
            return _never_told(model)
        if not loading.done():
            return f"the tokenizer of {model} is being loaded"
        error = loading.exception()
        return "" if error is None else _missing(model, error)

    async def tokenize(self, model: str, prompt: Prompt, timeout: float) -> tuple[int, ...]:
        """A prompt as ids, within `timeout` seconds.

        Raises:
            EmptyPrompt: nothing to compute.
            InvalidRequest: the chat template refuses the conversation.
            Unavailable: the model's tokenizer could not be loaded.
            DeadlinePassed: loading or tokenising took longer than `timeout`.
        """
        if isinstance(prompt, TokenIds):
            ids: tuple[int, ...] = prompt.ids
        else:
            size = sum(len(turn.content) for turn in prompt.turns) if isinstance(prompt, Chat) else len(prompt)
            if size == 0 and not isinstance(prompt, Chat):
                raise EmptyPrompt("the prompt is empty", param="prompt")
            try:
                async with asyncio.timeout(timeout):
                    tokenizer = await self._tokenizer(model)
                    if size <= IN_PLACE:
                        ids = _tokenize(tokenizer, prompt)
                    else:
                        loop = asyncio.get_running_loop()
                        ids = await loop.run_in_executor(self._pool, _tokenize, tokenizer, prompt)
            except TimeoutError:
                raise DeadlinePassed(f"the prompt was not tokenised within {timeout:.1f} s") from None
        if not ids:
            raise EmptyPrompt("the prompt has no token", param="prompt")
        return ids

    def close(self) -> None:
        """Ends the threads; safe twice."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _tokenizer(self, model: str) -> Tokenizer:
        loading = self._of_model.get(model)
        if loading is None:
            raise Unavailable(_never_told(model))
        if loading.done() and not loading.cancelled() and loading.exception() is None:
            return loading.result()
        try:
            return await asyncio.shield(loading)
        except ConfigError as error:
            raise Unavailable(_missing(model, error)) from error

    def _loaded(self, done: "asyncio.Future[Tokenizer]", model: str, name: str) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            log.info("tokenizer_loaded", model=model, tokenizer=name)
        else:
            log.error("tokenizer_missing", model=model, tokenizer=name, error=_said(error))
        self._changed()


def _never_told(model: str) -> str:
    return f"no engine has announced a tokenizer for {model}"


def _missing(model: str, error: BaseException) -> str:
    return f"no tokenizer for {model}: {_said(error)}; give token ids, or the proxy --tokenizer"


def _said(error: BaseException) -> str:
    return error.message if isinstance(error, PdserveError) else repr(error)


def _tokenize(tokenizer: Tokenizer, prompt: str | Chat) -> tuple[int, ...]:
    if isinstance(prompt, Chat):
        return tuple(tokenizer.encode_rendered(tokenizer.render(prompt)))
    return tuple(tokenizer.encode(prompt))
