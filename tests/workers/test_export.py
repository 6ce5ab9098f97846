"""`python -m flowrl.export`: what a run's own export writes, from a checkpoint, with one process."""

from __future__ import annotations

import json
import re
import resource
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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
from flowrl.config.model_shape import read_model_shape
from flowrl.protocol import DataProto
from flowrl.workers.hf_weights import FolderWriter, HFFolder
from flowrl.workers.stored_files import StoredReader

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


def exported(model: Path, out: Path) -> Path:
    """An export of the model as it is."""
    writer = FolderWriter(model, out)
    writer.add([("model.norm.weight", torch.ones(2))])
    writer.finish()
    return out


def test_only_an_earlier_export_is_replaced(model_folder: dict[str, Path], tmp_path: Path) -> None:
    model = model_folder["Qwen3"]
    out = exported(model, tmp_path / "out")
    export.check_writable(out)
    export.check_replaceable(out, model)
    export.check_replaceable(tmp_path / "absent", model)
    (tmp_path / "empty").mkdir()
    export.check_replaceable(tmp_path / "empty", model)
    for name in ("notes.txt", "metrics.jsonl", ".git", "checkpoints"):
        (out / name).mkdir() if "." not in name[1:] else (out / name).write_text("mine")
        with pytest.raises(ValueError, match="neither empty nor an earlier export"):
            export.check_replaceable(out, model)
        (out / name).rmdir() if (out / name).is_dir() else (out / name).unlink()
    export.check_replaceable(out, model)
    downloaded = shutil.copytree(model, tmp_path / "downloaded")
    with pytest.raises(ValueError, match="neither empty nor an earlier export"):
        export.check_replaceable(downloaded, model)
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match="neither empty nor an earlier export"):
        export.check_writable(out)


def test_an_export_stays_away_from_checkpoints_models_and_the_root(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (tmp_path / "link").symlink_to(checkpoint)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for out in (
        checkpoint,
        checkpoint / "out",
        checkpoint.parent / "new",
        tmp_path / "run",
        tmp_path,
        tmp_path / "link",
    ):
        with pytest.raises(ValueError, match="is, holds or lies in"):
            export.check_apart(export.resolved(out), checkpoint)
    export.check_apart(tmp_path / "run" / "export", checkpoint)
    with pytest.raises(ValueError, match="root of the file system"):
        export.check_writable(Path("/"))
    with pytest.raises(ValueError, match="circle"):
        export.resolved(tmp_path / "circle")
    with pytest.raises(ValueError, match="no such user"):
        export.resolved(Path("~nobody-of-this-name/out"))
    with pytest.raises(ValueError, match="is empty"):
        export.parse_options([str(checkpoint), ""])


def test_a_disk_that_refuses_leaves_what_was_there(model_folder: dict[str, Path], tmp_path: Path) -> None:
    """Files of this process may have 8 KiB meanwhile; safetensors has an error of its own for it."""
    out = exported(model_folder["Qwen3"], tmp_path / "out")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    writer = FolderWriter(out, out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.add([("a", torch.ones(1 << 16))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.abandon()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_absurd_numbers_of_layers_are_told_before_names_are_made(model_folder: dict[str, Path], tmp_path: Path) -> None:
    shape = replace(read_model_shape(model_folder["Qwen3"]), num_layers=10**12)
    with pytest.raises(ValueError, match="num_hidden_layers=1000000000000, but its files hold"):
        HFFolder(model_folder["Qwen3"]).check(shape)


def test_a_model_that_brings_code_is_exported_only_where_the_run_trusted_it(
    model_folder: dict[str, Path], tmp_path: Path
) -> None:
    model = shutil.copytree(model_folder["Qwen3"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"auto_map": {"AutoModel": "mine.Model"}}
    (model / "config.json").write_text(json.dumps(config))
    options = export.Options(tmp_path / "step_1", tmp_path / "out")
    tree = {"model": {"path": str(model), "cache_dir": str(tmp_path), "trust_remote_code": False}}
    with pytest.raises(ValueError, match="auto_map names mine.Model"):
        export.model_folder(json.dumps(tree), options)
    tree["model"]["trust_remote_code"] = True
    assert export.model_folder(json.dumps(tree), options) == model


def test_a_model_with_fewer_layers_than_the_checkpoint_is_refused(model_folder: dict[str, Path]) -> None:
    source = HFFolder(model_folder["Qwen3"])
    shape = read_model_shape(source.path)
    whole = {f"weight.{tensor.name}": (tensor.shape, torch.float32) for tensor in source.tensors(shape)}
    options = export.Options(Path("step_1"), Path("out"))

    class Reader(StoredReader):
        tensors = whole

    export._wanted(options, source, shape, Reader("step_1"))
    with pytest.raises(ValueError, match=r"tensors that .* has not: model\.layers\.1\."):
        export._wanted(options, source, replace(shape, num_layers=1), Reader("step_1"))


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
