from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import compose as compose_module
from flowrl.config.compose import ConfigError, compose
from flowrl.config.layout import pipeline_problem, stage_chunks
from flowrl.config.machine import Machine
from flowrl.config.schema import Config

MakeModel = Callable[..., Path]


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(argv)
    return str(caught.value)


def own_data(folder: Path) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    return [f"data.train_files={file}", f"data.eval_files={file}", "reward.function=m:f"]


# Layouts


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["cluster.devices=1", "rollout.layout.tp=2"],
            ["rollout.layout: tp*pp = 2*1 = 2 does not divide cluster.devices=1", "products: 1"],
        ),
        (
            ["actor.layout.tp=2", "actor.layout.pp=2"],
            ["actor.layout: tp*pp*cp = 2*2*1 = 4 does not divide cluster.devices=2", "1 or 2"],
        ),
        (
            ["cluster.devices=3", "actor.layout.tp=2"],
            ["actor.layout: tp*pp*cp = 2*1*1 = 2 does not divide cluster.devices=3", "1 or 3"],
        ),
        (
            ["cluster.devices=3", "actor.layout.tp=3"],
            ["actor.layout.tp=3: the model's 4 attention heads", "legal: 1, 2 or 4"],
        ),
        (
            ["cluster.devices=3", "rollout.layout.tp=3"],
            ["rollout.layout.tp=3: the model's 4 attention heads", "legal: 1, 2 or 4"],
        ),
        (
            ["cluster.devices=3", "actor.layout.pp=3"],
            ["actor.layout: 2 layers in stages of 1 leave nothing for the last of pp=3; nearest: pp=2"],
        ),
        (["cluster.devices=3", "rollout.layout.pp=3"], ["rollout.layout.pp=3 exceeds the model's 2 layers"]),
        (["critic.layout.tp=4"], ["critic.layout: tp*pp*cp"]),
        (["reference.layout.tp=4"], ["reference.layout: tp*pp*cp"]),
        (
            ["placement=split", "critic.layout.tp=2"],
            ["critic.layout: tp*pp*cp = 2*1*1 = 2 does not divide cluster.critic_devices=1"],
        ),
        (
            ["placement=standalone_rollout", "rollout.layout.tp=2"],
            ["rollout.layout: tp*pp = 2*1 = 2 does not divide cluster.rollout_devices=1", "products: 1"],
        ),
        (
            ["placement=standalone_rollout", "cluster.devices=4", "cluster.rollout_devices=3", "rollout.layout.pp=2"],
            ["rollout.layout: tp*pp = 1*2 = 2 does not divide cluster.rollout_devices=3", "products: 1 or 3"],
        ),
        (
            ["actor.layout.first_stage_layers=2", "actor.layout.pp=2"],
            ["actor.layout: 2 layers", "2 on the first", "first_stage_layers=1, or first_stage_layers=null"],
        ),
        (
            ["actor.layout.vpp=2", "actor.layout.pp=2"],
            ["actor.layout: 2 layers do not divide into pp=2 x vpp=2 = 4 chunks; legal: vpp=1"],
        ),
        (["actor.layout.vpp=2"], ["actor.layout: vpp=2 interleaves the stages of a pipeline, and pp=1 has one stage"]),
        (
            ["actor.layout.vpp=2", "actor.layout.pp=2", "actor.layout.first_stage_layers=1"],
            ["first_stage_layers=1 with vpp=2: the chunks of an interleaved pipeline are equal"],
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_the_equation(argv: list[str], expected: list[str]) -> None:
    """PAR-01: before anything starts, trainer and rollout told apart, the user's numbers and the legal ones."""
    message = refusal(*argv)
    for text in expected:
        assert text in message
    assert len(message.splitlines()) == 1, "one mistake is one message"


@pytest.mark.parametrize("devices", range(1, 9))
def test_defaults_fit_any_number_of_devices(devices: int) -> None:
    """PAR-01: defaults work on one device, and on any other number."""
    config = compose([f"cluster.devices={devices}"])
    assert config.actor.layout.tp == (2 if devices == 2 else 1)
    assert config.rollout.layout.tp == config.rollout.layout.pp == 1


@pytest.mark.parametrize(
    "heads, kv_heads, tp, legal",
    [(4, 2, 4, True), (4, 1, 2, True), (9, 3, 3, True), (12, 4, 3, False), (9, 3, 2, False)],
)
def test_key_value_heads_are_spread_or_copied_evenly(
    make_model: MakeModel, tmp_path: Path, heads: int, kv_heads: int, tp: int, legal: bool
) -> None:
    """PAR-04: heads % tp != 0 refused; fewer key/value heads than ranks only where the copies come out even."""
    model = make_model(num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=144)
    for role in ("actor", "rollout"):
        argv = [f"model.path={model}", f"cluster.devices={tp}", f"{role}.layout.tp={tp}", *own_data(tmp_path)]
        if legal:
            compose(argv)
        else:
            assert f"{role}.layout.tp={tp}" in refusal(*argv)


def test_an_engine_cannot_cut_a_vocabulary_whose_padding_does_not_divide(make_model: MakeModel, tmp_path: Path) -> None:
    """PAR-05: vLLM pads to a multiple of 64; the trainer pads to what its tp divides, and may."""
    model = make_model(num_attention_heads=6, num_key_value_heads=3, intermediate_size=144, vocab_size=100)
    argv = [f"model.path={model}", "cluster.devices=3", *own_data(tmp_path)]
    compose([*argv, "actor.layout.tp=3"])
    assert "vocabulary of 128 rows (a multiple of 64) cannot be cut into 3 parts; legal: 1" in refusal(
        *argv, "rollout.layout.tp=3"
    )


def test_the_home_of_nobody_is_a_folder_that_is_not_there() -> None:
    assert "~nobody-of-this-name/x has no config.json" in refusal("model.path='~nobody-of-this-name/x'")


def test_uneven_stages_work_and_refusals_name_the_nearest_legal_ones(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(num_hidden_layers=5)
    argv = [f"model.path={model}", "cluster.devices=4", *own_data(tmp_path)]
    assert compose([*argv, "actor.layout.pp=2"]).actor.layout.first_stage_layers is None
    config = compose([*argv, "actor.layout.pp=2", "actor.layout.first_stage_layers=4"])
    assert config.actor.layout.first_stage_layers == config.critic.layout.first_stage_layers == 4
    message = refusal(*argv, "actor.layout.pp=4")
    assert "actor.layout: 5 layers in stages of 2 leave nothing for the last of pp=4" in message
    assert "nearest: first_stage_layers=2, or pp=3 or 5" in message
    assert compose([*argv, "actor.layout.pp=4", "actor.layout.first_stage_layers=2"]).actor.layout.pp == 4


def test_interleaving_is_inherited_where_it_fits(make_model: MakeModel, tmp_path: Path) -> None:
    """PAR-01: a critic without a pipeline, or of layers that do not divide, is not interleaved."""
    model, other = make_model(num_hidden_layers=8), make_model("other", num_hidden_layers=6)
    argv = [f"model.path={model}", "cluster.devices=4", "actor.layout.pp=2", "actor.layout.vpp=2", *own_data(tmp_path)]
    config = compose([*argv, f"critic.path={other}"])
    assert (config.actor.layout.vpp, config.reference.layout.vpp) == (2, 2)
    assert (config.critic.layout.pp, config.critic.layout.vpp) == (2, 1)
    assert compose([*argv, "critic.layout.pp=1"]).critic.layout.vpp == 1
    assert compose([*argv, "actor.layout.vpp=4"]).critic.layout.vpp == 4
    assert "legal: vpp=1, 2 or 4" in refusal(*argv, "actor.layout.vpp=3")


def test_stages_add_up_to_the_model() -> None:
    for layers, pp, vpp, first in product(range(1, 13), range(1, 6), range(1, 5), [None, *range(1, 13)]):
        if pipeline_problem(layers, pp, vpp, first) is None:
            stages = stage_chunks(layers, pp, vpp, first)
            assert [len(chunks) for chunks in stages] == [vpp] * pp and all(map(all, (map(len, c) for c in stages)))
            virtual = [stages[number % pp][number // pp] for number in range(pp * vpp)]
            assert [layer for chunk in virtual for layer in chunk] == list(range(layers))
            assert first in (None, sum(map(len, stages[0])))
        else:
            with pytest.raises(ValueError, match="(legal|nearest): "):
                stage_chunks(layers, pp, vpp, first)


def test_head_sizes_that_the_cpu_engine_lacks_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(head_dim=16)
    assert "head size 16" in refusal(f"model.path={model}", *own_data(tmp_path))


# Batches


def predicted(config: Config) -> int:
    return config.data.prompts_per_step // config.actor.minibatch_prompts


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("micro", [1, 2, 3, 8])
@pytest.mark.parametrize("mini", [1, 2, 4, 8])
def test_every_batch_size_is_an_error_or_a_known_number_of_steps(mini: int, micro: int, devices: int) -> None:
    """CFG-01: 4 prompts x 2 samples; a micro-batch smaller than a row is legal, it never changes a result."""
    argv = [
        "data.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        f"actor.minibatch_prompts={mini}",
        "actor.layout.tp=1",
    ]
    argv += [f"actor.tokens_per_microbatch={micro}", f"cluster.devices={devices}"]
    if 4 % mini:
        message = refusal(*argv)
        assert f"data.prompts_per_step=4 cannot be cut into mini-batches of actor.minibatch_prompts={mini}" in message
        assert "nearest: data.prompts_per_step=8, or actor.minibatch_prompts=4" in message
    else:
        assert predicted(compose(argv)) == 4 // mini > 0


@pytest.mark.parametrize(("devices", "prompts", "samples"), [(2, 3, 1), (2, 3, 2), (3, 4, 2), (5, 1, 1)])
def test_rows_need_not_divide_by_devices(devices: int, prompts: int, samples: int) -> None:
    """BAT-01: any number of rows is legal; only prompts that do not fill mini-batches are an error."""
    argv = [f"cluster.devices={devices}", f"data.prompts_per_step={prompts}", f"rollout.samples_per_prompt={samples}"]
    compose([*argv, f"actor.minibatch_prompts={prompts}"])
    assert "data.prompts_per_step=32 or 64, or actor.minibatch_prompts=24 or 48" in refusal("data.prompts_per_step=48")


def test_critic_minibatches_are_checked_on_their_own() -> None:
    assert (
        "critic.minibatch_prompts=5; nearest: data.prompts_per_step=60 or 65, or critic.minibatch_prompts=4 or 8"
        in refusal("critic.minibatch_prompts=5")
    )
    assert compose(["actor.minibatch_prompts=16"]).critic.minibatch_prompts == 16


def test_groups_of_one_sample_are_refused() -> None:
    """ALG-04: the deviation of one sample does not exist."""
    message = refusal("algorithm=grpo", "rollout.samples_per_prompt=1")
    assert "rollout.samples_per_prompt=1 with GRPO" in message and ">=2" in message and "algorithm=gae" in message
    assert compose(["rollout.samples_per_prompt=1"]).rollout.samples_per_prompt == 1


# Lengths and memory


def test_prompt_and_response_must_fit_the_model(make_model: MakeModel, tmp_path: Path) -> None:
    """DAT-01: prompt + response > context is an error at the start."""
    model = make_model(max_position_embeddings=20)
    message = refusal(
        f"model.path={model}", "data.max_prompt_tokens=16", "rollout.max_response_tokens=8", *own_data(tmp_path)
    )
    assert "= 24 exceeds the 20 positions of model.path" in message and "max_response_tokens<=4" in message
    assert len(message.splitlines()) == 1


def test_sequences_stay_inside_a_sliding_window(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(architectures=["MistralForCausalLM"], sliding_window=20)
    assert "exceeds the 20 tokens of sliding-window" in refusal(f"model.path={model}", *own_data(tmp_path))


def test_a_long_model_context_does_not_size_the_cache(make_model: MakeModel, tmp_path: Path) -> None:
    """CPU-03: 32768 positions with tiny limits cost what the limits need."""
    models = [make_model(f"m{positions}", max_position_embeddings=positions) for positions in (256, 32768)]
    sizes = [compose([f"model.path={model}", *own_data(tmp_path)]).rollout.kv_cache_bytes for model in models]
    assert sizes[0] == sizes[1] < 2**27


def test_a_cache_too_small_or_too_big_says_needed_and_available() -> None:
    """CPU-03: the error restates needed against available in flowrl's own keys."""
    message = refusal("rollout.kv_cache_bytes=1000")
    assert "rollout.kv_cache_bytes=1000" in message and "131072" in message and "at least 262144" in message
    message = refusal("rollout.kv_cache_bytes=9000000000")
    assert "exceeds the memory of this machine, 8589934592 bytes" in message


def test_a_small_machine_gets_small_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU-03: 4 GB, 2 cores and 64 MiB of shared memory."""
    small = Machine(cpus=2, memory_bytes=4 * 2**30, shared_memory_bytes=64 * 2**20)
    monkeypatch.setattr(compose_module, "find_machine", lambda: small)
    config = compose(["cluster.devices=2"])
    assert config.cluster.object_store_bytes == 80_000_000
    assert config.rollout.kv_cache_bytes <= 4 * 2**30 // 8
    assert "exceeds the 67108864 bytes" in refusal("cluster.object_store_bytes=100000000")


# Devices


def test_devices_that_the_machine_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY-04: requested against available, and the override to change."""
    assert "needs 2 GPUs; torch sees 0 here; use cluster.device=cpu" in refusal(
        "cluster.device=cuda", "cluster.devices=2"
    )
    assert "at most 20 devices" in refusal("cluster.devices=21", "data.prompts_per_step=64")
    message = refusal("cluster.devices=16", "placement=split", "cluster.critic_devices=5")
    assert "cluster.devices=16 and cluster.critic_devices=5 (together 21)" in message
    message = refusal("cluster.devices=16", "placement=standalone_rollout", "cluster.rollout_devices=5")
    assert "cluster.devices=16 and cluster.rollout_devices=5 (together 21)" in message
    compose(["cluster.devices=20"])
    monkeypatch.setattr(
        compose_module, "find_machine", lambda: Machine(2, 2**33, 2**32, gpus=1, gpu_memory_bytes=2**35)
    )
    assert "needs 2 GPUs; torch sees 1 here" in refusal("cluster.devices=2")
    default = compose([])
    assert (default.cluster.devices, default.actor.dtype) == (1, "bfloat16")


def test_a_joined_cluster_is_not_judged_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose(["cluster.address=head:6379", "cluster.devices=64"]).cluster.devices == 64
    monkeypatch.setattr(compose_module, "find_machine", lambda: Machine(2, 2**33, 2**32, ray_address="auto"))
    assert compose(["cluster.devices=64", "cluster.device=cuda"]).cluster.device == "cuda"
    assert "20" in refusal("cluster.address=local", "cluster.devices=64"), "a Ray of its own, on this machine"


NO_ADDRESSES = (
    "::::", "head", "head:", ":6379", "head:0", "head:65536", "head:6379²", "ray://head:10001", "fd00::1:6379", "h:6379:1",
    "a b:6379", " :6379", "..:6379", "h..de:6379", f"{'h' * 70}:6379", "[]:6379", "h\n:6379", "\udcff:6379", "?:6379",
)  # fmt: skip


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_of_a_cluster_is_refused_before_the_run(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if address.isprintable():
        assert f"cluster.address={address!r} is no address" in refusal(f"cluster.address='{address}'")
    monkeypatch.setattr(compose_module, "find_machine", lambda: Machine(2, 2**33, 2**32, ray_address=address))
    assert f"RAY_ADDRESS={address!r} is no address" in refusal()
    for legal in ("'[fd00::1]:6379'", "'[fe80::1%eth0]:6379'", "10.0.0.1:6379", "head-0.ray_svc:6379", "auto", "local"):
        compose([f"cluster.address={legal}"])


# Knobs without effect, features that do not exist


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["algorithm=grpo", "critic.layout.tp=1"], "critic.layout.tp has no effect: GRPO has no critic"),
        (["algorithm=grpo", "critic.optim.lr=1"], "critic.optim.lr has no effect"),
        (["algorithm=grpo", "critic={epochs:1}"], "critic.epochs has no effect"),
        (["kl=none", "reference.layout.tp=1"], "reference.layout.tp has no effect: kl=none"),
        (["reference.recompute=true"], "the reference is frozen"),
        (["cluster.critic_devices=1"], "placement=colocate"),
        (["placement=split", "algorithm=grpo"], "placement has no effect"),
        (["cluster.rollout_devices=1"], "placement=colocate generates on the main pool"),
        (["placement=split", "cluster.rollout_devices=1"], "choose placement=standalone_rollout"),
        (["placement=standalone_rollout", "cluster.critic_devices=1"], "puts the critic on the main pool"),
        (["actor.optim.min_lr=1e-5"], "actor.optim.schedule=constant"),
        (["rollout.gpu_memory_fraction=0.5"], "cluster.device=cpu"),
        (["actor.offload=false", "rollout.cuda_graphs=false"], "cluster.device=cpu"),
        (["data.eval_files=[]", "data.eval_prompts=3"], "data.eval_files is empty"),
        (["data.eval_files=[]", "trainer.eval_every=3"], "nothing to evaluate on"),
    ],
)
def test_a_knob_that_nothing_reads_is_refused(argv: list[str], expected: str) -> None:
    """CFG-02: for each key, setting it changes something or is an error."""
    assert expected in refusal(*argv)


@pytest.mark.parametrize(
    "override",
    ["actor.layout.cp=2", "critic.layout.cp=2"],
)
def test_what_is_not_built_is_refused_by_name(override: str) -> None:
    message = refusal(override)
    assert override in message and "legal: " in message


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize("override", ["actor.layout.ep=2", "critic.layout.etp=2", "rollout.expert_parallel=true"])
def test_a_dense_model_has_no_experts_to_spread(override: str) -> None:
    message = refusal(override)
    assert f"{override}: LlamaForCausalLM has no experts; legal: " in message


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["cluster.devices=3", "actor.layout.ep=3"],
            "actor.layout.ep=3: the model's 8 experts cannot be shared by 3 ranks; legal: 1 or 2",
        ),
        (
            ["cluster.devices=3", "actor.layout.etp=3"],
            "actor.layout.etp=3: an expert's 64 columns cannot be cut into 3 parts; legal: 1 or 2",
        ),
        (
            ["cluster.devices=4", "actor.layout.pp=2", "actor.layout.ep=4"],
            "actor.layout: ep*etp = 4*1 = 4 does not divide the 2 devices of a pipeline stage (cluster.devices=4 over pp=2); legal products: 1 or 2",
        ),
        (
            ["rollout.layout.tp=2", "rollout.expert_parallel=true"],
            "3 experts cannot be shared by 2 ranks; or rollout.expert_parallel=false",
        ),
        (["rollout.layout.tp=2"], "an expert's 33 columns cannot be cut into 2 parts; or rollout.expert_parallel=true"),
    ],
)
def test_experts_fit_the_ranks_that_share_them(
    make_model: MakeModel, tmp_path: Path, argv: list[str], expected: str
) -> None:
    """PAR-01, PAR-08."""
    odd = {"num_experts": 3} if "3 experts" in expected else {"moe_intermediate_size": 33} if "33" in expected else {}
    model = make_model(**{**MIXTURE, **odd})
    assert expected in refusal(f"model.path={model}", *own_data(tmp_path), *argv)


def test_layouts_of_a_mixture_are_accepted(make_model: MakeModel, tmp_path: Path) -> None:
    model = [f"model.path={make_model(**MIXTURE)}", *own_data(tmp_path), "cluster.devices=4"]
    for argv in (
        ["actor.layout.ep=4"],
        ["actor.layout.tp=2", "actor.layout.ep=2", "actor.layout.etp=2"],
        ["actor.layout.pp=2", "actor.layout.ep=2"],
    ):
        config = compose([*model, *argv, "rollout.layout.tp=4", "rollout.expert_parallel=true"])
        assert config.critic.layout == config.reference.layout == config.actor.layout


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be 1 to the 8 experts"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 with normalised weights"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "router_jitter_noise": 0.1},
            "router_jitter_noise=0.1",
        ),
    ],
)
def test_a_mixture_that_would_not_be_exact_is_refused_by_name(
    make_model: MakeModel, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    assert named in refusal(f"model.path={make_model(**{**MIXTURE, **changes})}", *own_data(tmp_path))


# Data, reward, trainer


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["data.train_files=nowhere.jsonl"], "data.train_files: nowhere.jsonl is not a file"),
        (["data.train_files=builtin:arithmetics"], "did you mean builtin:arithmetic?"),
        (["data.train_files=[]"], "leaves nothing to train on"),
        (["data.eval_files=hf:"], "not of the form hf:NAME[:SPLIT]"),
        (["data.chat_template=nowhere.jinja"], "data.chat_template=nowhere.jinja is not a file"),
        (["model.path=/nowhere"], "model.path=/nowhere: model folder /nowhere has no config.json"),
        (["model.path=builtin:big"], "known: builtin:tiny"),
        (["critic.path=/nowhere"], "critic.path=/nowhere"),
        (["reward.function=grade"], "not of the form package.module:name"),
        (["reward.function=nowhere.py:f"], "there is no file nowhere.py"),
        (["reward.function=a-b:f"], "neither a module name"),
        (["reward.on_error=score"], "legal: raise, or score:<number>"),
        (["reward.on_error=score:nan"], "legal: raise, or score:<number>"),
        (["reward.on_error=ignore"], "legal: raise, or score:<number>"),
        (
            ["trainer.profile_steps=[0,3,41]"],
            "trainer.profile_steps=[0,41] are not steps of the run; legal: 1 to trainer.total_steps=40",
        ),
        (["actor.optim.warmup_steps=80"], "less than the 80 optimizer steps"),
        (["critic.warmup_steps=40"], "leaves none of trainer.total_steps=40"),
        (["actor.optim.schedule=linear", "actor.optim.min_lr=1"], "exceeds actor.optim.lr=0.0002"),
        (["rollout.stop_token_ids=[3,50]"], "rollout.stop_token_ids=[50]"),
        (["run.dir=pyproject.toml"], "is a file"),
    ],
)
def test_other_relations(argv: list[str], expected: str) -> None:
    assert expected in refusal(*argv)


def test_legal_error_scores() -> None:
    for text in ("raise", "score:0", "score:-1.5", "score:1e-3"):
        assert compose([f"reward.on_error={text}"]).reward.on_error == text


def test_own_data_need_a_reward_function(tmp_path: Path) -> None:
    """REW-02: the message has the data's name and the key to set."""
    data = own_data(tmp_path)[0]
    assert "rows.jsonl" in refusal(data) and "reward.function=auto" in refusal(data)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\n")
    assert "legal endings: .jsonl, .json, .parquet" in refusal(f"data.train_files={tmp_path}/a.csv")


def test_optional_packages_are_asked_for_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs the package `datasets`" in refusal("data.train_files=hf:gsm8k:train", "reward.function=m:f")
    assert "needs the package `wandb`" in refusal("trainer.loggers=[wandb]")


def test_reference_and_critic_share_the_vocabulary(make_model: MakeModel, tmp_path: Path) -> None:
    model, other = make_model(), make_model("other", vocab_size=140)
    data = own_data(tmp_path)
    assert "vocabulary of 140" in refusal(f"model.path={model}", f"reference.path={other}", *data)
    assert "vocabulary of 140" in refusal(f"model.path={model}", f"critic.path={other}", *data)


def test_an_unknown_architecture_lists_the_known_ones(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(architectures=["GPT2LMHeadModel"])
    assert (
        "GPT2LMHeadModel" in (message := refusal(f"model.path={model}", *own_data(tmp_path)))
        and "Qwen3ForCausalLM" in message
    )
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["trainer.resume=runs/none/checkpoints/step_8"], "trainer.resume=runs/none/checkpoints/step_8 is no folder"),
        (["trainer.keep_checkpoints=3"], "trainer.keep_checkpoints has no effect: trainer.save_every=0"),
        (["trainer.resume=never", "trainer.resume_allow=[kl]"], "trainer.resume_allow has no effect"),
    ],
)
def test_knobs_of_checkpoints_are_checked(argv: list[str], expected: str) -> None:
    assert expected in refusal(*argv)
