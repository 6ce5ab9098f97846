"""The shape of the house: layers look down only, each heavy library has one owner, files and functions stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_LOOP_LINES = 400, 60, 60

BELOW = {
    "config": set(),
    "protocol": set(),
    "algorithms": set(),
    "checkpoints": {"config"},
    "single_controller": {"protocol"},
    "resharding": {"config", "protocol", "algorithms"},
    "data": {"config", "protocol", "builtin"},
    "rewards": {"config", "protocol"},
    "builtin": {"config", "protocol", "rewards"},
    "workers": {"config", "protocol", "algorithms", "checkpoints", "single_controller", "resharding"},
}
"""What each layer may import of flowrl beside itself. Anything else at the top level of flowrl sits above them all."""

ENTRY_POINTS = {"benchmark.py", "__main__.py"}
"""Programs: they sit on top wherever they lie."""

OWNERS = {
    "ray": {"single_controller"},
    "tensordict": {"protocol"},
    "hydra": {"config"},
    "omegaconf": {"config"},
    "megatron": {"workers"},
    "vllm": {"workers"},
    "datasets": {"data"},
    "pyarrow": {"data"},
    "transformers": {"data", "builtin"},
}


def sources(*folders: str) -> list[Path]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert files
    return sorted(files)


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(path: Path) -> str:
    parts = path.relative_to(ROOT / "flowrl").with_suffix("").parts
    return parts[0]


def test_layers_look_down_only() -> None:
    for path in sources("flowrl"):
        own = layer(path)
        if own not in BELOW or path.name in ENTRY_POINTS:
            continue
        for name in imports(path):
            if name.startswith("flowrl."):
                target = name.split(".")[1]
                assert target == own or target in BELOW[own], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("library", OWNERS)
def test_each_heavy_library_has_one_owner(library: str) -> None:
    for path in sources("flowrl", "recipes"):
        if any(name == library or name.startswith(library + ".") for name in imports(path)):
            assert path.is_relative_to(ROOT / "flowrl") and layer(path) in OWNERS[library], f"{path} imports {library}"


def test_configuration_imports_no_torch() -> None:
    for path in sources("flowrl/config"):
        assert not any(name.split(".")[0] == "torch" for name in imports(path)), path


def test_vllm_private_parts_are_touched_in_one_place() -> None:
    for path in sources("flowrl"):
        if any(name.startswith("vllm.") and name.count(".") > 1 for name in imports(path)):
            assert path.name.startswith("vllm_private") or path.parent.name == "vllm_private", path


def test_files_and_functions_are_within_budget() -> None:
    for path in sources("flowrl", "recipes"):
        text = path.read_text()
        assert text.count("\n") <= MAX_FILE_LINES, f"{path}: {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name}: {lines} lines"


@pytest.mark.parametrize("path", ["flowrl/main_ppo.py", "recipes/remax.py"])
def test_the_loop_of_a_driver_fits_one_screen(path: str) -> None:
    loops = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.For)]
    assert loops
    assert all((loop.end_lineno or 0) - loop.lineno + 1 <= MAX_LOOP_LINES for loop in loops)


def test_no_source_names_a_path_of_the_machine_or_a_registry() -> None:
    forbidden = ("/root/", "/home/", "/work/", "pypi.org", "files.pythonhosted")
    for path in sources("flowrl", "recipes", "tests"):
        if path != Path(__file__):
            assert not any(word in path.read_text() for word in forbidden), path
