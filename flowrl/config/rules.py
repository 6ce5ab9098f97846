"""Relations between fields, checked before anything starts. Every message has the numbers and what would be legal."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.config.effect import without_effect
from flowrl.config.layout import nearest_divisors, nearest_multiples, words
from flowrl.config.layout_rules import layout_problems
from flowrl.config.machine import Machine
from flowrl.config.model_code import custom_code
from flowrl.config.paths import is_file, is_folder, user_path
from flowrl.config.resolve import BUILTIN_DATA, Shapes, kv_bytes_per_sequence
from flowrl.config.schema import AUTO, Config, OptimConfig
from flowrl.config.tree import nearest, show
from flowrl.config.units import all_devices, error_score, optimizer_steps, pool_of, pools

MIN_CPUS_PER_DEVICE = 0.1
ADDRESS = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|(?=[^:]{1,253}:)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*):(?P<port>[0-9]{1,5})",
    re.ASCII,
)
"""`host:port` of a Ray cluster."""
SUFFIXES = (".jsonl", ".json", ".parquet")

LEAST_REWARD_BYTES = 64 << 20
"""Private memory of a Python process with numpy, about twice."""


@dataclass(frozen=True)
class Facts:
    """What rules look at beside the tree: `given` are the keys that the user set, `values` the tree as a flat table."""

    shapes: Shapes
    machine: Machine
    given: frozenset[str]
    values: Mapping[str, Any]

    @property
    def joins(self) -> bool:
        """Whether the run joins a Ray cluster, so that this machine's devices are not the ones that count."""
        return self.address not in (None, "local")

    @property
    def address(self) -> str | None:
        """Of the Ray cluster that the run is told to use."""
        address: str | None = self.values["cluster.address"] or self.machine.ray_address
        return address


def problems(config: Config, facts: Facts) -> list[str]:
    """Everything that is wrong with a resolved configuration; empty when it can run."""
    groups = (
        _unbuilt,
        _address,
        _machine,
        _model_code,
        _model,
        _batches,
        _schedule,
        _context,
        _data,
        _reward,
        _trainer,
    )
    found = [problem for group in groups for problem in group(config, facts)]
    return [*found, *layout_problems(config, facts.shapes), *without_effect(config, facts.given)]


def _unbuilt(config: Config, facts: Facts) -> Iterator[str]:
    for role in ("actor", "critic", "reference"):
        key = f"{role}.layout.cp"
        if facts.values[key] > 1 and (role == "actor" or key in facts.given):
            yield f"{key}={facts.values[key]}: context parallelism is not built yet; legal: 1"


def _address(config: Config, facts: Facts) -> Iterator[str]:
    if facts.address in (None, "local", "auto"):
        return
    found = ADDRESS.fullmatch(facts.address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        key = "cluster.address" if config.cluster.address else "RAY_ADDRESS"
        yield f"{key}={facts.address!r} is no address of a Ray cluster; legal: host:port of its head (ports 1 to 65535; IPv6 in brackets), auto or local"


def _machine(config: Config, facts: Facts) -> Iterator[str]:
    if facts.joins:
        return
    cluster, machine = config.cluster, facts.machine
    devices = all_devices(config)
    text = " and ".join(f"{pool.key}={pool.devices}" for pool in pools(config).values())
    if devices > cluster.devices:
        text += f" (together {devices})"
    if cluster.device == "cuda" and devices > machine.gpus:
        remedy = "cluster.device=cpu, a Ray cluster (cluster.address)" + (
            f", or at most {machine.gpus} devices" if machine.gpus else ""
        )
        yield f"{text} with cluster.device=cuda needs {devices} GPUs; torch sees {machine.gpus} here; use {remedy}"
    most = int(machine.cpus / MIN_CPUS_PER_DEVICE)
    if cluster.device == "cpu" and devices > most:
        yield (
            f"{text} would get {machine.cpus / devices:.3f} of {machine.cpus} CPUs each; "
            f"at least {MIN_CPUS_PER_DEVICE} is needed, so at most {most} devices"
        )
    if "cluster.object_store_bytes" in facts.given and cluster.object_store_bytes > machine.shared_memory_bytes:
        yield (
            f"cluster.object_store_bytes={cluster.object_store_bytes} exceeds the {machine.shared_memory_bytes} bytes that are "
            "free in /dev/shm; give less, or auto"
        )


def _model_code(config: Config, facts: Facts) -> Iterator[str]:
    if config.model.trust_remote_code:
        return
    keys = ["model.path"]
    keys += ["critic.path"] if config.algorithm.needs_critic else []
    keys += ["reference.path"] if config.kl.needs_reference else []
    for folder in dict.fromkeys(str(facts.values[key]) for key in keys):
        found = [] if folder.startswith("builtin:") else custom_code(folder)
        if found:
            key = next(key for key in keys if facts.values[key] == folder)
            yield (
                f"{key}={folder} brings Python code of its own ({'; '.join(found)}), which runs only with "
                "model.trust_remote_code=true; read that code first, or remove auto_map from these files: flowrl knows the architecture"
            )


def _model(config: Config, facts: Facts) -> Iterator[str]:
    policy, reference = facts.shapes.policy, facts.shapes.reference
    if config.kl.needs_reference and reference.vocab_size != policy.vocab_size:
        yield (
            f"reference.path={config.reference.path} has a vocabulary of {reference.vocab_size}, model.path={config.model.path} one "
            f"of {policy.vocab_size}; the KL term compares token by token, so they must be equal"
        )
    if config.algorithm.needs_critic and facts.shapes.critic.vocab_size != policy.vocab_size:
        yield (
            f"critic.path={config.critic.path} has a vocabulary of {facts.shapes.critic.vocab_size}, model.path={config.model.path} "
            f"one of {policy.vocab_size}; both read the same token ids, so they must be equal"
        )
    beyond = [token for token in config.rollout.stop_token_ids if not 0 <= token < policy.vocab_size]
    if beyond:
        yield f"rollout.stop_token_ids={show(beyond)} are no ids of the model; legal: 0 to {policy.vocab_size - 1}"


def _batches(config: Config, facts: Facts) -> Iterator[str]:
    prompts = config.data.prompts_per_step
    sizes = [("actor", config.actor.minibatch_prompts)]
    if config.algorithm.needs_critic and config.critic.minibatch_prompts != config.actor.minibatch_prompts:
        sizes.append(("critic", config.critic.minibatch_prompts))
    for role, size in sizes:
        if prompts % size:
            near = nearest_divisors(prompts, size)
            yield (
                f"data.prompts_per_step={prompts} cannot be cut into mini-batches of {role}.minibatch_prompts={size}; nearest: "
                f"data.prompts_per_step={words(nearest_multiples(prompts, size))}, or {role}.minibatch_prompts={words(near)}"
            )
    samples, least = config.rollout.samples_per_prompt, config.algorithm.min_samples_per_prompt
    if samples < least:
        name = type(config.algorithm).__name__
        yield (
            f"rollout.samples_per_prompt={samples} with {name}: a group needs at least {least} samples, the deviation of one sample "
            f"does not exist; give rollout.samples_per_prompt>={least} or another algorithm (algorithm=gae)"
        )


def _schedule(config: Config, facts: Facts) -> Iterator[str]:
    steps = optimizer_steps(config)
    roles: list[tuple[str, OptimConfig, int]] = [("actor", config.actor.optim, steps.actor_total)]
    if config.algorithm.needs_critic:
        roles.append(("critic", config.critic.optim, steps.critic_total))
    for role, optim, total in roles:
        if optim.warmup_steps and optim.warmup_steps >= total:
            yield (
                f"{role}.optim.warmup_steps={optim.warmup_steps} must be less than the {total} optimizer steps that the run makes; "
                f"legal: 0 to {max(0, total - 1)}"
            )
        if optim.min_lr > optim.lr:
            yield f"{role}.optim.min_lr={optim.min_lr:g} exceeds {role}.optim.lr={optim.lr:g}; legal: 0 to {optim.lr:g}"
    if config.algorithm.needs_critic and config.critic.warmup_steps >= config.trainer.total_steps:
        yield (
            f"critic.warmup_steps={config.critic.warmup_steps} leaves none of trainer.total_steps={config.trainer.total_steps} to "
            f"the policy; legal: 0 to {config.trainer.total_steps - 1}"
        )


def _context(config: Config, facts: Facts) -> Iterator[str]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    for key, shape in (
        ("model.path", facts.shapes.policy),
        ("critic.path", facts.shapes.critic),
        ("reference.path", facts.shapes.reference),
    ):
        if key != "model.path" and shape is facts.shapes.policy:
            continue
        limits = [(shape.max_positions, "positions")]
        if shape.sliding_window is not None:
            limits.append(
                (
                    shape.sliding_window,
                    "tokens of sliding-window attention, beyond which training and generation would differ",
                )
            )
        for limit, what in limits:
            if prompt + response > limit:
                yield (
                    f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response} = {prompt + response} exceeds the "
                    f"{limit} {what} of {key}={facts.values[key]}; give max_response_tokens<={max(0, limit - prompt)} or a shorter prompt limit"
                )
    sequence = kv_bytes_per_sequence(facts.values, facts.shapes.policy)
    if config.rollout.kv_cache_bytes < 2 * sequence:
        yield (
            f"rollout.kv_cache_bytes={config.rollout.kv_cache_bytes} does not hold one sequence of {prompt + response} tokens, which "
            f"takes {sequence} bytes (and as much again as reserve); give at least {2 * sequence}, or auto"
        )
    pool = pool_of(config, "rollout")
    share = facts.machine.memory_bytes // pool.devices
    if config.cluster.device == "cpu" and not facts.joins and config.rollout.kv_cache_bytes > share:
        yield (
            f"rollout.kv_cache_bytes={config.rollout.kv_cache_bytes} on each of {pool.key}={pool.devices} exceeds "
            f"the memory of this machine, {facts.machine.memory_bytes} bytes; give less than {share}, or auto"
        )


def _data(config: Config, facts: Facts) -> Iterator[str]:
    if not config.data.train_files:
        yield "data.train_files=[] leaves nothing to train on; give JSONL or Parquet files"
    for key in ("data.train_files", "data.eval_files"):
        for name in facts.values[key]:
            yield from _file(key, name)
    if config.data.chat_template is not None and not is_file(config.data.chat_template):
        yield f"data.chat_template={config.data.chat_template} is not a file; give a file with a Jinja template, or null"


def _file(key: str, name: str) -> Iterator[str]:
    if name.startswith("builtin:"):
        if name != BUILTIN_DATA:
            yield f"{key}: {name} is not built in; legal: {BUILTIN_DATA}{nearest(name, [BUILTIN_DATA])}"
    elif name.startswith("hf:"):
        if not re.fullmatch(r"hf:[^:]+(:[^:]+)?", name):
            yield f"{key}: {name} is not of the form hf:NAME[:SPLIT]"
        elif importlib.util.find_spec("datasets") is None:
            yield f"{key}: {name} needs the package `datasets`, which is not installed (pip install 'flowrl[datasets]'); JSONL and Parquet files need nothing"
    elif not is_file(name):
        yield f"{key}: {name} is not a file; give JSONL or Parquet files, hf:NAME[:SPLIT] or {BUILTIN_DATA}"
    elif not name.endswith(SUFFIXES):
        yield f"{key}: {name} is of no known kind; legal endings: {', '.join(SUFFIXES)}"


def _reward(config: Config, facts: Facts) -> Iterator[str]:
    function = config.reward.function
    if function == AUTO:
        files = show([*config.data.train_files, *config.data.eval_files])
        yield f"reward.function=auto grades {BUILTIN_DATA} only, the data are {files}; give package.module:name or path/to/file.py:name"
    else:
        place, colon, name = function.rpartition(":")
        if not colon or not place or not name.isidentifier():
            yield f"reward.function={function} is not of the form package.module:name or path/to/file.py:name"
        elif place.endswith(".py") and not is_file(place):
            yield f"reward.function={function}: there is no file {place}"
        elif not place.endswith(".py") and not all(part.isidentifier() for part in place.split(".")):
            yield f"reward.function={function}: {place} is neither a module name nor a file that ends in .py"
    try:
        error_score(config.reward.on_error)
    except ValueError as error:
        yield f"reward.on_error={config.reward.on_error} is not legal; {error}"
    if 0 < config.reward.memory_bytes < LEAST_REWARD_BYTES:
        yield f"reward.memory_bytes={config.reward.memory_bytes} is less than a Python process takes; legal: 0 (no limit), or at least {LEAST_REWARD_BYTES}"


def _trainer(config: Config, facts: Facts) -> Iterator[str]:
    total = config.trainer.total_steps
    outside = [step for step in config.trainer.profile_steps if not 1 <= step <= total]
    if outside:
        yield f"trainer.profile_steps={show(outside)} are not steps of the run; legal: 1 to trainer.total_steps={total}"
    if "wandb" in config.trainer.loggers and importlib.util.find_spec("wandb") is None:
        yield "trainer.loggers=[wandb] needs the package `wandb`, which is not installed (pip install 'flowrl[wandb]')"
    if config.trainer.eval_every and "trainer.eval_every" in facts.given and not config.data.eval_files:
        yield f"trainer.eval_every={config.trainer.eval_every} with data.eval_files=[]: there is nothing to evaluate on; give files or trainer.eval_every=0"
    if config.trainer.resume not in ("auto", "never") and not is_folder(config.trainer.resume):
        yield f"trainer.resume={config.trainer.resume} is no folder; legal: auto, never, or the folder of a checkpoint (.../checkpoints/step_N)"
    folder = user_path(config.run.dir)
    if str(folder).startswith("~"):
        yield f"run.dir={config.run.dir}: there is no user {folder.parts[0][1:]!r} here"
    try:
        if folder.exists() and not folder.is_dir():
            yield f"run.dir={config.run.dir} is a file; give a folder"
        above = [each for each in folder.parents if each.exists() and not each.is_dir()]
        if above:
            yield f"run.dir={config.run.dir} lies below {above[0]}, which is a file; give a folder that can be written"
        if not folder.resolve().name:
            yield f"run.dir={config.run.dir} is the root of the file system, beside which nothing can lie; give a folder below it"
    except OSError as error:
        yield f"run.dir={folder} cannot be used: {error.strerror}; give a folder that can be written"
    except RuntimeError:
        # What `resolve` raises for a link that leads to itself.
        yield f"run.dir={folder} is a link that leads to itself; give a folder that can be written"
