from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flowrl.checkpoints.manifest import digest_file
from flowrl.checkpoints.start import check_data, find_restart, find_start, trained_roles, versions
from flowrl.checkpoints.state import RoleState, RunState
from flowrl.checkpoints.store import CheckpointStore
from flowrl.config.compose import compose, to_yaml
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError


@cache
def config(folder: Path, *overrides: str) -> Config:
    return compose([f"run.dir={folder}", "trainer.total_steps=12", "trainer.save_every=4", *overrides])


def save(folder: Path, step: int, made_with: Config, **changes: object) -> Path:
    store = CheckpointStore(folder / "checkpoints", keep=0)
    partial = store.begin(step)
    (partial / "actor").mkdir()
    (partial / "critic").mkdir()
    names = [
        f"{role}/{name}"
        for role in ("actor", "critic")
        for name in (".metadata", "common.pt", "metadata.json", "__0_0.distcp")
    ]
    for name in names:
        (partial / name).write_text(name)
    state = RunState(
        step=step, run_id="id", total_steps=12, kl_coefficient=0.1, data={"a.jsonl": "1", "b.jsonl": "2"}, skipped_in_a_row={},
        roles=trained_roles(made_with), versions=versions(),
    )  # fmt: skip
    return store.commit(replace(state, **changes), to_yaml(made_with), [digest_file(partial, name) for name in names])  # type: ignore[arg-type]


def test_without_checkpoints_a_run_begins_with_step_1(tmp_path: Path) -> None:
    for resume in ("auto", "never"):
        start = find_start(config(tmp_path, f"trainer.resume={resume}"))
        assert (start.step, start.checkpoint, start.warnings) == (0, None, ())
        assert start.words(12) == "nothing to resume: the run begins with step 1"


def test_auto_takes_the_newest_and_never_none(tmp_path: Path) -> None:
    for step in (4, 8):
        save(tmp_path, step, config(tmp_path))
    start = find_start(config(tmp_path))
    assert (start.step, start.in_place, start.warnings) == (8, True, ())
    assert "resumes from" in start.words(12) and "with step 9 of 12" in start.words(12)
    assert find_start(config(tmp_path, "trainer.resume=never")).checkpoint is None


def test_a_restart_takes_what_the_run_has_written_whatever_resume_says(tmp_path: Path) -> None:
    elsewhere = find_start(config(tmp_path / "b", f"trainer.resume={save(tmp_path / 'a', 4, config(tmp_path / 'a'))}"))
    for resume in ("never", "auto", str(tmp_path / "a" / "checkpoints" / "step_4")):
        folder = tmp_path / resume.replace("/", "_")
        own = config(folder, f"trainer.resume={resume}")
        assert find_restart(own, elsewhere) == elsewhere, "nothing is written yet: the run begins as it began"
        save(folder, 8, own)
        again = find_restart(own, elsewhere)
        assert (again.step, again.in_place) == (8, True)
        (folder / "checkpoints" / "step_8" / "state.json").unlink()
        broken = find_restart(own, elsewhere)
        assert broken.step == 4 and not broken.in_place and "step_8 is not complete" in broken.warnings[0]


def test_a_damaged_newest_is_passed_over_with_a_warning_and_refused_by_its_path(tmp_path: Path) -> None:
    """CKP-01."""
    for step in (4, 8):
        save(tmp_path, step, config(tmp_path))
    shard = tmp_path / "checkpoints" / "step_8" / "critic" / "__0_0.distcp"
    shard.write_text("crit")
    start = find_start(config(tmp_path))
    assert start.step == 4
    assert start.warnings == (
        "step_8 is not complete and was skipped: critic/__0_0.distcp is truncated: 4 of 19 bytes",
    )
    path = tmp_path / "checkpoints" / "step_8"
    with pytest.raises(
        ConfigError, match=r"step_8 is not a complete checkpoint: critic/__0_0.distcp is truncated: 4 of 19"
    ):
        find_start(config(tmp_path, f"trainer.resume={path}"))
    shard.unlink()
    with pytest.raises(ConfigError, match="critic/__0_0.distcp is missing"):
        find_start(config(tmp_path, f"trainer.resume={path}"))


def test_a_path_is_taken_in_place_or_for_another_run(tmp_path: Path) -> None:
    for step in (4, 8):
        save(tmp_path / "one", step, config(tmp_path / "one"))
    path = tmp_path / "one" / "checkpoints" / "step_4"
    assert find_start(config(tmp_path / "one", f"trainer.resume={path}")).in_place
    other = find_start(config(tmp_path / "two", f"trainer.resume={path}"))
    assert (other.step, other.in_place) == (4, False)


def test_keys_that_change_the_result_are_refused_with_both_values_unless_allowed(tmp_path: Path) -> None:
    save(tmp_path, 8, config(tmp_path))
    changed = ("actor.optim.lr=0.001", "kl=none", "cluster.devices=4", "actor.layout.pp=2", "trainer.eval_every=3")
    with pytest.raises(ConfigError) as caught:
        find_start(config(tmp_path, *changed))
    message = str(caught.value)
    assert "actor.optim.lr: 0.0002 in the checkpoint, 0.001 now" in message
    assert "kl: reward in the checkpoint, none now" in message
    assert "trainer.resume_allow=[actor.optim.lr,kl]" in message and message.count(" in the checkpoint, ") == 2
    assert find_start(config(tmp_path, *changed, "trainer.resume_allow=[kl,actor.optim.lr]")).step == 8


def test_a_run_that_is_done_says_so_and_fewer_steps_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, 12, config(tmp_path))
    start = find_start(config(tmp_path))
    assert start.step == 12 and "nothing to do" in start.words(12) and "step 12" in start.words(12)
    with pytest.raises(ConfigError, match=r"trainer.total_steps=8, and .*step_12 is of step 12 already; give"):
        find_start(config(tmp_path, "trainer.total_steps=8"))
    assert find_start(config(tmp_path, "trainer.total_steps=20")).step == 12


def test_prompts_that_have_changed_are_refused_by_their_file(tmp_path: Path) -> None:
    save(tmp_path, 8, config(tmp_path))
    checkpoint = find_start(config(tmp_path)).checkpoint
    assert checkpoint is not None
    check_data(config(tmp_path), checkpoint, {"a.jsonl": "1", "b.jsonl": "2"})
    with pytest.raises(ConfigError, match=r"^b.jsonl: these prompts are not those"):
        check_data(config(tmp_path), checkpoint, {"a.jsonl": "1", "b.jsonl": "3"})
    check_data(config(tmp_path, "trainer.resume_allow=[data.train_files]"), checkpoint, {"c.jsonl": "1"})


def test_other_versions_are_a_warning(tmp_path: Path) -> None:
    save(tmp_path, 8, config(tmp_path), versions={**versions(), "torch": "1.0"})
    (warning,) = find_start(config(tmp_path)).warnings
    assert "torch 1.0 then" in warning


def test_roles_say_their_layout_in_words(tmp_path: Path) -> None:
    roles = trained_roles(config(tmp_path, "cluster.devices=4", "actor.layout.tp=2", "actor.layout.pp=2"))
    assert roles == {name: RoleState("tp 2, pp 2", 4) for name in ("actor", "critic")}
    assert str(roles["actor"]) == "tp 2, pp 2 on 4 rank(s)"
    assert set(trained_roles(config(tmp_path, "algorithm=grpo"))) == {"actor"}


def test_after_a_failure_the_newest_checkpoint_counts_whatever_the_run_began_with(tmp_path: Path) -> None:
    other = save(tmp_path / "other", 4, config(tmp_path / "other"))
    for resume in ("never", str(other)):
        began = config(tmp_path / "run", f"trainer.resume={resume}")
        first = find_start(began)
        assert find_restart(began, first).checkpoint == first.checkpoint
    save(tmp_path / "run", 8, began)
    assert find_restart(began, first).step == 8 and find_restart(began, first).in_place


def test_a_link_in_checkpoints_and_a_link_to_run_dir_are_in_place(tmp_path: Path) -> None:
    """CKP-01: the run goes on where it is, however its folder and its checkpoint are named."""
    save(tmp_path / "real", 4, config(tmp_path / "real"))
    elsewhere = tmp_path / "large_disk"
    elsewhere.mkdir()
    step = tmp_path / "real" / "checkpoints" / "step_4"
    step.rename(elsewhere / "step_4")
    step.symlink_to(elsewhere / "step_4")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for run in ("real", "link"):
        for resume in ("auto", str(step), str(tmp_path / "link" / "checkpoints" / "step_4")):
            assert find_start(config(tmp_path / run, f"trainer.resume={resume}")).in_place, (run, resume)
    assert not find_start(config(tmp_path / "real", f"trainer.resume={elsewhere / 'step_4'}")).in_place


def test_a_checkpoint_elsewhere_in_run_dir_is_refused_since_run_dir_would_be_set_aside(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 8, config(tmp_path / "run"))
    (tmp_path / "run" / "backup").mkdir()
    path.rename(tmp_path / "run" / "backup" / "step_8")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for base in ("run", "link"):
        backup = tmp_path / base / "backup" / "step_8"
        with pytest.raises(
            ConfigError, match=r"lies in run.dir=.* but not in its checkpoints/.*give another run.dir, or move"
        ):
            find_start(config(tmp_path / "run", f"trainer.resume={backup}"))
    assert find_start(config(tmp_path / "other", f"trainer.resume={backup}")).step == 8


def test_a_key_that_nobody_has_cannot_be_allowed(tmp_path: Path) -> None:
    for step in (4, 8):
        with pytest.raises(
            ConfigError, match=r"resume_allow: unknown key actor.optim.lrr; did you mean actor.optim.lr\?"
        ):
            find_start(config(tmp_path, "trainer.resume_allow=[actor.optim.lrr]"))
        find_start(config(tmp_path, "trainer.resume_allow=[actor.optim.lr,kl,data.train_files]"))
        save(tmp_path, step, config(tmp_path))


def test_a_file_in_place_of_checkpoints_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ConfigError, match=r"checkpoints is a file, and checkpoints lie in a folder"):
        find_start(config(tmp_path))
