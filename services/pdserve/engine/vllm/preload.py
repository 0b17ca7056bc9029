"""Imports what an engine needs, for a fork server: the slow part of a start, done once."""

import gc
import os

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm.engine.arg_utils
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.gpu_model_runner  # noqa: F401

import pdserve.engine.vllm.connector
import pdserve.engine.vllm.engine  # noqa: F401

# What is shared stays shared: a collection of garbage would look at it, and thereby copy it.
gc.freeze()
