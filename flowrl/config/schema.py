"""Every knob of flowrl, once: a tree of frozen dataclasses with a default, a unit and a sentence for each key.

The tree is data only. `compose.py` fills it from the command line, `rules.py` checks relations between fields, and
`docs/configuration.md` is generated from it. A key whose default is ``AUTO`` is replaced by a concrete value before the
objects are built, so no code outside this package ever sees the word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

AUTO = "auto"

Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "sum-norm"]
Placement = Literal["colocate", "split", "standalone_rollout"]
Schedule = Literal["constant", "linear", "cosine"]
KLEstimator = Literal["k1", "k2", "k3"]


def knob(default: Any, doc: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A documented field; `minimum` and `maximum` are inclusive bounds that are checked when the tree is built."""
    if isinstance(default, list):
        raise TypeError("defaults are immutable: give a tuple")
    return field(default=default, metadata={"doc": doc, "minimum": minimum, "maximum": maximum, "free": False})


def free(default: Any, doc: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A knob that a resumed run may change: it changes no result, beyond rounding where it says how work is divided.

    A change of any other knob is refused on resume.
    """
    made = knob(default, doc, minimum=minimum, maximum=maximum)
    return field(default=default, metadata={**made.metadata, "free": True})


def section(cls: type, doc: str, *, all_free: bool = False) -> Any:
    """A nested section with its own defaults; `all_free`: a resumed run may change every knob of it."""
    return field(default_factory=cls, metadata={"doc": doc, "free": all_free})


@dataclass(frozen=True)
class ModelConfig:
    path: str = knob(
        "builtin:tiny", "Hugging Face folder (safetensors, config, tokenizer) of actor and reference, or `builtin:tiny`"
    )
    trust_remote_code: bool = free(
        False,
        "let tokenizer and engine run Python code of the model folder (`auto_map`); false: such a folder is refused",
    )
    cache_dir: str = free("~/.cache/flowrl", "where built-in models are made once and kept")


@dataclass(frozen=True)
class ClusterConfig:
    devices: int = knob(
        AUTO,
        "devices of the main pool, one process each; auto: 2 on cpu; on cuda this machine's GPUs, two thirds of them under `placement=split`",
        minimum=1,
    )
    device: Device = knob(AUTO, "`cpu`, `cuda` or `auto` (cuda where torch sees one)")
    critic_devices: int = knob(
        AUTO,
        "devices of the critic's own pool under `placement=split`; auto: half of `cluster.devices`, at least 1",
        minimum=1,
    )
    rollout_devices: int = knob(
        AUTO,
        "devices of the rollout's own pool under `placement=standalone_rollout`; auto: half of `cluster.devices`, at least 1",
        minimum=1,
    )
    address: str | None = knob(
        None, "Ray cluster to join (`host:port` or `auto`); null: RAY_ADDRESS if set, else a new local cluster"
    )
    object_store_bytes: int = knob(
        AUTO,
        "size of a new local cluster's object store, bytes; auto: a quarter of free shared memory, at most 2 GiB",
        minimum=80_000_000,
    )
    placement_timeout_seconds: float = knob(
        300.0, "how long to wait for devices that other jobs hold, seconds", minimum=1
    )
    collective_timeout_seconds: float = knob(
        600.0, "a collective that waits longer than this is a failure, seconds", minimum=5
    )
    call_timeout_seconds: float | None = free(
        3600.0,
        "a method of a role that runs longer than this is a failure, seconds: whatever hangs ends the run, naming ranks and "
        "stacks; null: no limit",
        minimum=5,
    )


@dataclass(frozen=True)
class DataConfig:
    train_files: tuple[str, ...] = knob(
        ("builtin:arithmetic",),
        "JSONL or Parquet files, Hugging Face dataset names (`hf:NAME[:SPLIT]`), or `builtin:arithmetic`",
    )
    eval_files: tuple[str, ...] = knob(("builtin:arithmetic",), "held-out prompts, same forms; empty: no evaluation")
    prompts_per_step: int = knob(
        64, "prompts per training step (each sampled `rollout.samples_per_prompt` times)", minimum=1
    )
    max_prompt_tokens: int = knob(16, "limit on a prompt after templating, tokens", minimum=1)
    overlong: Literal["error", "drop", "truncate_left"] = knob("error", "what happens to a prompt over the limit")
    shuffle: bool = knob(True, "new order of prompts per epoch, from `trainer.seed`")
    chat_template: str | None = knob(None, "file with a Jinja chat template that replaces the tokenizer's")
    template_strings: bool = knob(
        False, "wrap string prompts as one user message in the chat template; false: plain text"
    )
    eval_prompts: int | None = knob(128, "evaluate on the first N held-out prompts; null: all", minimum=1)


@dataclass(frozen=True)
class RewardConfig:
    function: str = knob(
        AUTO,
        "`package.module:name` or `path/to/file.py:name`; auto: the built-in task's grader (an error with other data)",
    )
    num_processes: int = free(AUTO, "reward processes; auto: one per CPU, at most 8", minimum=1)
    timeout_seconds: float = free(
        10.0, "wall-clock limit per row (or per batch of a `@batched` function), seconds", minimum=0.01
    )
    memory_bytes: int = free(
        AUTO,
        "private memory that each reward process, and each one it starts, may have, bytes; 0: no limit; auto: half of this machine's memory divided by num_processes, at least 1 GiB",
        minimum=0,
    )
    on_error: str = knob(
        "raise", "`raise` ends the run naming row and function; `score:<x>` scores the row x and counts it"
    )


@dataclass(frozen=True)
class RolloutLayout:
    tp: int = knob(AUTO, "tensor-parallel size of generation; auto: 1", minimum=1)
    pp: int = knob(AUTO, "pipeline-parallel size of generation; auto: 1", minimum=1)


@dataclass(frozen=True)
class RolloutConfig:
    samples_per_prompt: int = knob(8, "samples per prompt", minimum=1)
    max_response_tokens: int = knob(8, "limit on a response, tokens", minimum=1)
    temperature: float = knob(1.0, "sampling temperature; log-probs everywhere are of this distribution", minimum=0.01)
    top_p: float = knob(1.0, "nucleus mass; 1 is off", minimum=0.01, maximum=1)
    top_k: int = knob(0, "keep the k likeliest tokens; 0 is off", minimum=0)
    stop_token_ids: tuple[int, ...] = knob((), "further ids that end a response, beside those of tokenizer and model")
    layout: RolloutLayout = section(RolloutLayout, "parallel layout of generation", all_free=True)
    expert_parallel: bool = free(
        False, "whole experts spread over the tensor-parallel ranks, instead of a slice of every expert on each"
    )
    dtype: DType = knob(AUTO, "weights of the engine; auto: float32 on cpu, bfloat16 on cuda")
    max_batch_requests: int = free(
        AUTO, "requests that an engine runs at once; auto: rows of a step per replica, at most 512", minimum=1
    )
    kv_cache_bytes: int = free(
        AUTO,
        "KV cache per rank, bytes; auto: what max_batch_requests full sequences need, bounded by memory",
        minimum=1,
        maximum=1 << 50,
    )
    cuda_graphs: bool = free(
        True, "on a GPU, compile the model and capture graphs of its decoding: faster, and half a minute more to start"
    )
    gpu_memory_fraction: float = free(0.4, "share of a GPU that the engine may use", minimum=0.05, maximum=0.95)
    fingerprint_every: int = free(
        1, "compare trainer's and engine's weights after every n-th transfer; 0 is never", minimum=0
    )
    logprob_diff_warn: float = free(
        0.05, "warn when mean |trainer - rollout| log-prob of a step exceeds this", minimum=0
    )


@dataclass(frozen=True)
class TrainLayout:
    tp: int = knob(AUTO, "tensor-parallel size; auto: 1 on one device, 2 on two, else 1", minimum=1)
    pp: int = knob(AUTO, "pipeline-parallel size; auto: 1", minimum=1)
    vpp: int = knob(
        AUTO, "model chunks per pipeline stage (interleaved schedule); pp * vpp divides the layers; auto: 1", minimum=1
    )
    first_stage_layers: int | None = knob(
        AUTO,
        "layers on the first pipeline stage; null or auto: equal stages, the last has fewer where layers do not divide",
        minimum=1,
    )
    cp: int = knob(AUTO, "context-parallel size; auto: 1; more is not built yet: refused", minimum=1)
    ep: int = knob(AUTO, "ranks of a pipeline stage that share the experts of each layer; auto: 1", minimum=1)
    etp: int = knob(AUTO, "ranks that each expert is cut over; auto: 1", minimum=1)


@dataclass(frozen=True)
class OptimConfig:
    lr: float = knob(2e-4, "peak learning rate", minimum=0)
    schedule: Schedule = knob("constant", "shape after warm-up, over all optimizer steps of the run")
    warmup_steps: int = knob(0, "optimizer steps of linear warm-up", minimum=0)
    min_lr: float = knob(0.0, "learning rate at the end of the schedule", minimum=0)
    weight_decay: float = knob(0.0, "decoupled weight decay (AdamW)", minimum=0)
    beta1: float = knob(0.9, "Adam beta1", minimum=0, maximum=0.9999)
    beta2: float = knob(0.999, "Adam beta2", minimum=0, maximum=0.99999)
    eps: float = knob(1e-8, "Adam epsilon", minimum=0)
    clip_grad: float = knob(1.0, "clip the global gradient norm at this; 0 is off", minimum=0)


@dataclass(frozen=True)
class EngineConfig:
    """What actor, critic and reference share: how Megatron-core holds and runs a model."""

    layout: TrainLayout = section(TrainLayout, "parallel layout of training", all_free=True)
    dtype: DType = knob(AUTO, "weights and activations; auto: float32 on cpu, bfloat16 on cuda")
    tokens_per_microbatch: int = free(
        AUTO,
        "tokens (prompts and responses, without padding) of one micro-batch on one data-parallel rank; auto: 4096, or one full row if that is longer",
        minimum=1,
    )
    distributed_optimizer: bool = free(False, "shard optimizer states over data-parallel ranks")
    recompute: bool = free(False, "recompute activations in the backward pass")
    offload: bool = free(
        True, "on a GPU, weights and optimizer states wait in pinned host memory while the engine generates"
    )


@dataclass(frozen=True)
class ActorConfig(EngineConfig):
    optim: OptimConfig = section(OptimConfig, "optimizer")
    minibatch_prompts: int = knob(
        32,
        "prompts of one optimizer step (all samples of a prompt together); divides `data.prompts_per_step`",
        minimum=1,
    )
    epochs: int = knob(1, "passes over a step's batch", minimum=1)
    clip_low: float = knob(0.2, "ratio is clipped below at 1 - clip_low", minimum=0, maximum=1)
    clip_high: float = knob(0.2, "ratio is clipped above at 1 + clip_high", minimum=0)
    dual_clip: float | None = knob(
        3.0, "bound on the ratio where the advantage is negative (dual clip); null is off", minimum=1
    )
    entropy_coefficient: float = knob(0.0, "weight of the entropy bonus", minimum=0)
    aggregation: Aggregation = knob("token-mean", "how token losses of a mini-batch become one number")


@dataclass(frozen=True)
class CriticConfig(EngineConfig):
    path: str = knob(AUTO, "Hugging Face folder of the critic's trunk; auto: `model.path` (with a new value head)")
    optim: OptimConfig = section(OptimConfig, "optimizer")
    minibatch_prompts: int = knob(AUTO, "prompts of one optimizer step; auto: `actor.minibatch_prompts`", minimum=1)
    epochs: int = knob(AUTO, "passes over a step's batch; auto: `actor.epochs`", minimum=1)
    value_clip: float | None = knob(0.5, "clip the change of a value against the old one; null is off", minimum=0)
    aggregation: Aggregation = knob(AUTO, "how token losses become one number; auto: `actor.aggregation`")
    warmup_steps: int = knob(0, "steps in which only the critic learns", minimum=0)


@dataclass(frozen=True)
class ReferenceConfig(EngineConfig):
    path: str = knob(AUTO, "Hugging Face folder; auto: `model.path`")


@dataclass(frozen=True)
class Algorithm:
    """Base of the variants of the config group `algorithm`. The class variables say what a variant needs of a run."""

    needs_critic: ClassVar[bool] = False
    min_samples_per_prompt: ClassVar[int] = 1


@dataclass(frozen=True)
class GAE(Algorithm):
    """PPO with a critic: generalised advantage estimation (Schulman et al. 2016, eq. 16)."""

    needs_critic: ClassVar[bool] = True
    gamma: float = knob(1.0, "discount per token", minimum=0, maximum=1)
    lam: float = knob(1.0, "GAE lambda", minimum=0, maximum=1)
    whiten: bool = knob(True, "whiten advantages over all response tokens of the step")


@dataclass(frozen=True)
class GRPO(Algorithm):
    """Group-relative advantages (Shao et al. 2024, section 4.1.2); no critic."""

    min_samples_per_prompt: ClassVar[int] = 2
    normalize_std: bool = knob(True, "divide by the group's sample deviation")
    eps: float = knob(1e-6, "added to the deviation", minimum=0)


@dataclass(frozen=True)
class KL:
    """Base of the variants of the config group `kl`."""

    needs_reference: ClassVar[bool] = True


@dataclass(frozen=True)
class NoKL(KL):
    """No reference model, no KL term."""

    needs_reference: ClassVar[bool] = False


@dataclass(frozen=True)
class RewardKL(KL):
    """Per-token KL subtracted from the reward, fixed coefficient."""

    coefficient: float = knob(0.001, "weight of the KL term", minimum=0)
    estimator: KLEstimator = knob("k1", "estimator (Schulman 2020, `Approximating KL divergence`)")


@dataclass(frozen=True)
class AdaptiveKL(KL):
    """Per-token KL subtracted from the reward, coefficient steered to a target (Ziegler et al. 2019, section 2.2)."""

    coefficient: float = knob(0.01, "initial weight of the KL term", minimum=0)
    target: float = knob(0.1, "KL per token that the controller aims at", minimum=1e-9)
    horizon: int = knob(10_000, "samples over which the coefficient adapts", minimum=1)
    estimator: KLEstimator = knob("k1", "estimator")


@dataclass(frozen=True)
class LossKL(KL):
    """KL term added to the policy loss."""

    coefficient: float = knob(0.001, "weight of the KL term", minimum=0)
    estimator: KLEstimator = knob("k3", "estimator")


VARIANTS: dict[str, dict[str, type]] = {
    "algorithm": {"gae": GAE, "grpo": GRPO},
    "kl": {"none": NoKL, "reward": RewardKL, "adaptive": AdaptiveKL, "loss": LossKL},
}
"""Config groups: `algorithm=grpo` chooses a type, `algorithm.eps=...` sets its field. A recipe may add its own type."""


@dataclass(frozen=True)
class TrainerConfig:
    total_steps: int = free(
        40, "training steps; on resume free only where every learning rate is constant after its warm-up", minimum=1
    )
    seed: int = knob(
        0, "seed of everything: data order, sampling, mini-batches, new parameters", minimum=0, maximum=2**32 - 1
    )
    eval_every: int = free(10, "evaluate every n steps and after the last, and before step 1; 0 is never", minimum=0)
    save_every: int = free(
        0, "write a checkpoint, from which a run can go on, every n steps and after the last; 0 is never", minimum=0
    )
    keep_checkpoints: int = free(2, "complete checkpoints that are kept, the newest ones; 0 keeps all", minimum=0)
    export_every: int = free(0, "export a Hugging Face folder every n steps and after the last; 0 is never", minimum=0)
    grace_seconds: float = free(
        25.0,
        "after SIGTERM or SIGINT, how long the step under way and its checkpoint may take before they are abandoned, seconds; at "
        "once where there are no checkpoints, and at a second signal",
        minimum=0,
    )
    resume: str = free(
        "auto",
        "`auto`: go on from the newest complete checkpoint in `run.dir`, if there is one; `never`: an earlier run there is set aside; "
        "or the folder of a checkpoint",
    )
    resume_allow: tuple[str, ...] = free(
        (), "keys that change the result and may all the same differ from those of the checkpoint"
    )
    max_restarts: int = free(
        0,
        "how often the run is begun again from its newest checkpoint when a worker dies or raises; a run that fails three times at one step in the same way ends all the same",
        minimum=0,
    )
    max_skipped_steps: int = free(3, "optimizer steps with non-finite gradients in a row that end the run", minimum=1)
    profile_steps: tuple[int, ...] = free((), "steps whose driver and worker timeline is written to `run.dir/profile/`")
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = free(
        ("tensorboard",), "where metrics go beside `metrics.jsonl`"
    )
    samples_per_step: int = free(8, "rows written to `run.dir/samples/step_N.jsonl`", minimum=0)


@dataclass(frozen=True)
class RunConfig:
    dir: str = knob(AUTO, "folder of the run; auto: `runs/<timestamp>`")
    name: str = knob(AUTO, "name of the run in logs; auto: the folder's name")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = section(ModelConfig, "the policy's model")
    cluster: ClusterConfig = section(ClusterConfig, "devices and Ray", all_free=True)
    placement: Placement = free(
        "colocate",
        "`colocate`: all roles on one pool; `split`: the critic on its own; `standalone_rollout`: generation on its own, never asleep",
    )
    data: DataConfig = section(DataConfig, "prompts")
    reward: RewardConfig = section(RewardConfig, "scores")
    rollout: RolloutConfig = section(RolloutConfig, "generation (vLLM)")
    actor: ActorConfig = section(ActorConfig, "policy training (Megatron-core)")
    critic: CriticConfig = section(CriticConfig, "value training; `critic.layout` inherits `actor.layout`")
    reference: ReferenceConfig = section(ReferenceConfig, "frozen policy for the KL term; inherits `actor.layout`")
    algorithm: Algorithm = section(GAE, "config group `algorithm`: how advantages are made")
    kl: KL = section(RewardKL, "config group `kl`: where the KL term goes")
    trainer: TrainerConfig = section(TrainerConfig, "the loop")
    run: RunConfig = section(RunConfig, "where results go", all_free=True)
    dry_run: bool = free(False, "print the resolved run (tree, placement, batch arithmetic, memory) and exit")
