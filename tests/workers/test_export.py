"""`python -m flowrl.export`: what a run's own export writes, from a checkpoint, with one process."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from models import make_model
from processes import run
from rollout_scenarios import Setup, prompts, sample
from state_scenarios import write_roles
from test_rollout import log_probs_of
from test_update import with_old_log_probs

from flowrl import export
from flowrl.checkpoints.manifest import digest_file
from flowrl.checkpoints.state import RoleState, RunState
from flowrl.checkpoints.store import CheckpointStore
from flowrl.protocol import DataProto

CONTRADICTING = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}


@pytest.fixture(scope="module")
def trained(batch: DataProto, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A complete checkpoint of actor and critic, and the folder with their own exports."""
    root = tmp_path_factory.mktemp("trained")
    model = make_model(root / "model", "Qwen3", tie_word_embeddings=True)
    (model / "generation_config.json").write_text(json.dumps(CONTRADICTING))
    store = CheckpointStore(root / "checkpoints", keep=1)
    ranks = run(2, write_roles, model, with_old_log_probs(batch), store.begin(1), root / "exports")
    roles = {"actor": RoleState("tp2", 2), "critic": RoleState("pp2", 2)}
    state = RunState(1, "run", 1, 0.0, {}, {}, roles, {})
    paths = {"model": {"path": str(model), "cache_dir": str(root)}, "critic": {"path": str(model)}}
    return store.commit(state, json.dumps(paths), [digest for rank in ranks for digest in rank]), root / "exports"


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_exported_checkpoint_is_the_run_s_own_export(
    trained: tuple[Path, Path], tmp_path: Path, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte; CKP-03: a generation_config.json that contradicts itself is written as it was loaded."""
    checkpoint, exports = trained
    out = tmp_path / "deep" / "out"
    assert export.main([str(checkpoint), str(out), f"role={role}"]) == 0, capsys.readouterr().err
    files = {file.name: file.read_bytes() for file in out.iterdir()}
    assert files == {file.name: file.read_bytes() for file in (exports / role).iterdir()}
    assert json.loads(files["generation_config.json"]) == CONTRADICTING
    assert ("value_head.safetensors" in files) == (role == "critic")


def test_an_exported_checkpoint_loads_in_transformers_and_vllm(trained: tuple[Path, Path], tmp_path: Path) -> None:
    """CKP-03: the engine's log-probs are those of transformers, and both are not those of before training."""
    out, batch = tmp_path / "out", prompts([3, 17])
    export.export(export.Options(trained[0], out))
    [[rows]] = run(1, sample, out, [Setup()], batch)
    assert log_probs_of(out, batch, rows) <= 1e-4
    assert log_probs_of(trained[0].parent.parent / "model", batch, rows) > 1e-2


def test_what_keeps_a_checkpoint_from_being_exported_is_told_before_any_work(
    trained: tuple[Path, Path], model_folder: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = trained
    file = tmp_path / "file"
    file.write_text("")

    def error(*arguments: object) -> str:
        assert export.main([str(argument) for argument in arguments]) == 2
        return capsys.readouterr().err

    assert "1 folders instead of CHECKPOINT and OUT" in error(checkpoint)
    assert "role=reward is not legal; legal: actor | critic" in error(checkpoint, tmp_path / "out", "role=reward")
    assert "unknown key rolle" in error(checkpoint, tmp_path / "out", "rolle=critic")
    # An output that cannot be written is told before the checkpoint, absent here, is looked at.
    assert f"{file}/out cannot be written: Not a directory" in error(tmp_path / "absent", file / "out")
    assert f"{file} is there and is no folder" in error(tmp_path / "absent", file)
    assert "is no complete checkpoint: there is no such folder" in error(tmp_path / "absent", tmp_path / "out")
    other = f"model={model_folder['Llama']}"
    assert "lm_head.weight [131, 64]; the run had another model" in error(checkpoint, tmp_path / "out", other)
    assert "is not a folder" in error(checkpoint, tmp_path / "out", "model=nowhere")
    assert not (tmp_path / "out").exists()
    damaged = tmp_path / checkpoint.name
    damaged.mkdir()
    for path in checkpoint.rglob("*"):
        target = damaged / path.relative_to(checkpoint)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    with (damaged / "actor" / "__0_0.distcp").open("r+b") as opened:
        opened.truncate(1000)
    assert "actor/__0_0.distcp is truncated: 1000 of" in error(damaged, tmp_path / "out")


def test_the_page_about_checkpoints_is_true_of_exports_and_tensors(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands and its script, with a checkpoint put in the place where its runs would have written one."""
    page = (Path(__file__).parent.parent.parent / "docs" / "checkpoints.md").read_text()
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    shutil.copytree(trained[0].parent, tmp_path / "runs" / "mine" / "checkpoints")
    (tmp_path / "runs/mine/checkpoints/step_1").rename(tmp_path / "runs/mine/checkpoints/step_8")
    state = tmp_path / "runs/mine/checkpoints/step_8/state.json"
    manifest = tmp_path / "runs/mine/checkpoints/step_8/manifest.json"
    old = digest_file(state.parent, state.name)
    state.write_text(state.read_text().replace('"step": 1', '"step": 8'))
    new = digest_file(state.parent, state.name)
    manifest.write_text(manifest.read_text().replace(old.sha256, new.sha256))
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"^    python -m flowrl\.export (.*)$", page, flags=re.MULTILINE):
        assert export.main(command.split()) == 0, capsys.readouterr().err
    assert (tmp_path / "exported-critic" / "value_head.safetensors").exists()
    script = page[page.index("    from flowrl.workers.stored_files") :]
    exec(textwrap.dedent(script), {})
    assert "exp_avg.model.norm.weight (64,) 0." in capsys.readouterr().out
