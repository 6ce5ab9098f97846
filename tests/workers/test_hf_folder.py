from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import make_model
from processes import run
from safetensors.torch import load_file, save_file
from scenarios import Cell, critic_round_trip, export_cells

from flowrl.config.model_shape import read_model_shape
from flowrl.resharding.families import hf_tensors
from flowrl.workers.hf_weights import HFFolder
from flowrl.workers.weights import _difference

WEIGHTS = "model.safetensors"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def rewritten(folder: Path, target: Path, change: dict[str, torch.Tensor | None], **config: object) -> Path:
    """A copy of the folder with tensors changed, added or (None) removed, and settings of config.json changed."""
    target.mkdir()
    tensors = {**tensors_of(folder), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, target / WEIGHTS)
    (target / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return target


def check(folder: Path) -> None:
    HFFolder(folder).check(read_model_shape(folder))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "tied"])
def test_table_names_exactly_the_tensors_that_transformers_writes(model_folder: dict[str, Path], family: str) -> None:
    shape = read_model_shape(model_folder[family])
    expected = {tensor.name: tensor.shape for tensor in hf_tensors(shape)}
    assert {name: tuple(t.shape) for name, t in tensors_of(model_folder[family]).items()} == expected
    check(model_folder[family])


def test_missing_unexpected_and_wrong_tensors_are_all_named(model_folder: dict[str, Path], tmp_path: Path) -> None:
    changed = rewritten(
        model_folder["Llama"],
        tmp_path / "changed",
        {
            "model.norm.weight": None,
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
            "model.surprise": torch.zeros(2),
            "model.layers.1.mlp.up_proj.weight": torch.zeros(3, 2),
        },
    )
    with pytest.raises(ValueError) as error:
        check(changed)
    message = str(error.value)
    assert "1 missing: model.norm.weight" in message and "1 unexpected: model.surprise" in message
    assert "model.layers.1.mlp.up_proj.weight (3, 2) instead of (128, 64)" in message


@pytest.mark.parametrize("odd", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_a_tensor_that_is_no_plain_weight_is_named(
    model_folder: dict[str, Path], tmp_path: Path, odd: torch.dtype
) -> None:
    """SYN-03: integers and eight-bit floats would be copied without their scales."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = tensors_of(model_folder["Llama"])[name]
    with pytest.raises(ValueError, match=f"1 of a type that is no plain weight .*known: BF16, F16, F32.*: {name} "):
        check(rewritten(model_folder["Llama"], tmp_path / "odd", {name: tensor.to(odd)}))
    check(rewritten(model_folder["Llama"], tmp_path / "half", {name: tensor.half()}))


def test_a_quantised_folder_is_refused_before_anything_is_read(model_folder: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(model_folder["Llama"], tmp_path / "int4", {}, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match="quantization_config is not supported; give a folder of plain weights"):
        read_model_shape(folder)


def test_parameters_that_megatron_and_the_table_do_not_share_are_named() -> None:
    """SYN-03: on either side, and in shape, with what to do."""
    known = {f"decoder.layers.{n}.scale": (4,) for n in range(9)}
    message = _difference(
        {"embedding": (8, 4), "gone": (2,), "bent": (2, 3)}, {"embedding": (8, 4), "bent": (3, 2)} | known
    )
    assert "9 Megatron-core has, and the family's table lacks: decoder.layers.0.scale, " in message
    assert "1 the table has, and Megatron-core lacks: gone" in message
    assert "1 of another shape: bent [3, 2] instead of [2, 3]" in message
    assert "describe it in flowrl/resharding/families.py" in message


def test_long_lists_of_names_are_cut_with_their_count(model_folder: dict[str, Path], tmp_path: Path) -> None:
    gone = {name: None for name in tensors_of(model_folder["Llama"]) if "layers.0" in name}
    with pytest.raises(ValueError, match="9 missing: .* and 4 more"):
        check(rewritten(model_folder["Llama"], tmp_path / "changed", dict(gone)))


def test_tie_flag_that_contradicts_the_files_is_an_error(model_folder: dict[str, Path], tmp_path: Path) -> None:
    """PAR-07."""
    with pytest.raises(ValueError, match="tie_word_embeddings=true, but lm_head.weight differs"):
        check(rewritten(model_folder["Llama"], tmp_path / "untied", {}, tie_word_embeddings=True))
    with pytest.raises(ValueError, match="set it to true if the model is tied"):
        check(rewritten(model_folder["tied"], tmp_path / "tied", {}, tie_word_embeddings=False))


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no .safetensors"):
        HFFolder(tmp_path)


@pytest.mark.parametrize("family", ["Qwen2", "tied"])
def test_loaded_then_exported_folder_is_bit_identical(
    model_folder: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """PAR-05 (padding stays here), PAR-07 (a tied model has no head of its own), CKP-03 (other files as they are)."""
    folder = model_folder[family]
    cells = [Cell(tp=2), Cell(pp=2), Cell(pp=2, vpp=2), Cell()]
    run(2, export_cells, folder, cells, tmp_path)
    original = tensors_of(folder)
    for number in range(len(cells)):
        exported = tensors_of(tmp_path / str(number))
        assert set(exported) == set(original)
        assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
        assert all(exported[name].dtype == tensor.dtype for name, tensor in original.items())
        for file in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (tmp_path / str(number) / file).read_bytes() == (folder / file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(number) for number in range(len(cells))]


def test_sharded_bfloat16_folder_survives_a_float32_engine_bit_for_bit(tmp_path: Path) -> None:
    """The original type is kept; several files and their index are read and written."""
    from transformers import AutoModelForCausalLM

    plain = make_model(tmp_path / "plain", dtype="bfloat16")
    AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "sharded", max_shard_size="100KB"
    )
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    (tmp_path / "out").mkdir()
    run(2, export_cells, tmp_path / "sharded", [Cell(tp=2), Cell(tp=2, dtype="bfloat16")], tmp_path / "out", 50_000)
    original = tensors_of(plain)
    for number in (0, 1):
        folder = tmp_path / "out" / str(number)
        exported = tensors_of(folder)
        assert len(list(folder.glob("*.safetensors"))) > 2
        assert all(
            torch.equal(exported[name], tensor) and exported[name].dtype == tensor.dtype
            for name, tensor in original.items()
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert torch.equal(model.state_dict()["model.norm.weight"], original["model.norm.weight"])


def test_exported_critic_keeps_its_value_head(model_folder: dict[str, Path], tmp_path: Path) -> None:
    for before, after in run(2, critic_round_trip, model_folder["tied"], tmp_path / "critic"):
        assert torch.equal(before, after) and bool((before != 0).any())
