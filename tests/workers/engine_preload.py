"""Imported by the server that test processes are forked from: vLLM, with the environment it needs, once for all."""

import os

from flowrl.workers.environment import process_environment

os.environ.update(process_environment("cpu", 2, cpus=2))

from flowrl.workers import vllm_private  # noqa: E402

# Looking its names up imports every part of vLLM that an engine needs.
MISSING_NAMES = vllm_private.missing_names()
