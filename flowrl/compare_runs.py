"""`python -m flowrl.compare_runs A B`: whether two runs are the same run, bit for bit; if not, where they part.

Compared are metrics, samples, the checkpoints and exports that both have, tensor by tensor. One process, no Ray.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.checkpoints.start import FOLDER
from flowrl.checkpoints.store import open_checkpoint
from flowrl.command import run_command
from flowrl.config.paths import user_path

if TYPE_CHECKING:
    import torch

USAGE = """usage: python -m flowrl.compare_runs A B [--from-step N]

A, B          folders of two runs (run.dir)
--from-step   compare only what belongs to step N or a later one
"""
EXIT_DIFFERENT, EXIT_BAD_INPUT = 1, 2
SHOWN = 5
TIMES = ("seconds/", "memory/")
TIME_ENDINGS = ("_seconds", "tokens_per_second")
STATE_FIELDS = ("step", "kl_coefficient", "data", "skipped_in_a_row")
"""What a checkpoint says of its run, without the run's name, layouts and versions."""
NUMBER = re.compile("0|[1-9][0-9]{0,17}")
"""A step as flowrl writes it, in names of files too."""


def by_nature(metric: str) -> bool:
    """Whether a metric differs between two equal runs: how long something took, and how much memory."""
    return metric.startswith(TIMES) or metric.endswith(TIME_ENDINGS)


@dataclass
class Comparison:
    """`same`: what is equal, in words; `differences`: one sentence each, with both values; `notes`: what was left out."""

    same: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        """For the console."""
        lines = [f"note: {note}" for note in self.notes]
        if not self.differences:
            return "\n".join([*lines, f"bit-identical: {', '.join(self.same)}"]) + "\n"
        lines += [f"equal: {', '.join(self.same)}"] if self.same else []
        return "\n".join([*lines, "different:", *(f"  {each}" for each in self.differences)]) + "\n"


def compare(a: Path, b: Path, from_step: int = 0) -> Comparison:
    """Two run folders from a step on. Error: `ValueError` where one is no run folder or nothing is left to compare."""
    found = Comparison()
    _compare_metrics(a, b, from_step, found)
    _compare_samples(a, b, from_step, found)
    for step in _common(a / FOLDER, b / FOLDER, from_step, found):
        _compare_checkpoints(a / FOLDER / step, b / FOLDER / step, found)
    for step in _common(a / "export", b / "export", from_step, found):
        _compare_exports(a / "export" / step, b / "export" / step, found)
    return found


# Metrics and samples


def _metrics(folder: Path, from_step: int) -> dict[int, dict[str, Any]]:
    """Metrics by step. A last line that is not whole is left out."""
    path, rows = folder / "metrics.jsonl", {}
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no metrics.jsonl")
    for number, line in enumerate(_text(path).split("\n")[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        plain = isinstance(row, dict) and not any(isinstance(value, dict | list) for value in row.values())
        if not plain or type(step := row.pop("step", None)) is not int:
            raise ValueError(f"{path}, line {number} is not the metrics of a step: {line[:80]}")
        if step in rows:
            raise ValueError(f"{path}, line {number}: step {step} is there twice")
        rows[step] = row
    return {step: row for step, row in rows.items() if step >= from_step}


def _text(path: Path) -> str:
    """Every character as it is, ends of lines too. Error: `ValueError` with the path where it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None


def _compare_metrics(a: Path, b: Path, from_step: int, found: Comparison) -> None:
    ours, theirs = _metrics(a, from_step), _metrics(b, from_step)
    if not ours or not theirs:
        raise ValueError(f"{a if not ours else b} has no step from {from_step} on")
    if ours.keys() != theirs.keys():
        found.differences.append(f"steps: {_ranges(ours)} in A, {_ranges(theirs)} in B")
    both = [step for step in ours if step in theirs]
    wrong = list(islice((each for step in both for each in _row_differences(step, ours[step], theirs[step])), SHOWN))
    found.differences += wrong
    if both and not wrong:
        found.same.append(f"steps {_ranges(both)}")
    left_out = ", ".join([*(f"{start}..." for start in TIMES), *(f"...{end}" for end in TIME_ENDINGS)])
    found.notes.append(f"metrics that differ by nature are not compared: {left_out}")


def _row_differences(step: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*ours, *theirs}):
        if by_nature(key):
            continue
        if (key in ours) != (key in theirs):
            yield f"step {step}, {key}: {_shown(ours, key)} in A, {_shown(theirs, key)} in B"
        elif repr(ours[key]) != repr(theirs[key]):  # bits: not-a-number equals itself, -0.0 is not 0.0, 1 is not 1.0
            yield f"step {step}, {key}: {_values(ours[key], theirs[key])}"


def _compare_samples(a: Path, b: Path, from_step: int, found: Comparison) -> None:
    ours, theirs = _samples(a, from_step), _samples(b, from_step)
    wrong: list[str] = []
    for step in sorted({*ours, *theirs}):
        one, two = ours.get(step), theirs.get(step)
        if one is None or two is None:
            wrong.append(f"samples of step {step}: in {'B' if one is None else 'A'} only")
        elif one != two:
            row = next((n for n, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
            shown = [rows[row][:120] if row < len(rows) else "absent" for rows in (one, two)]
            wrong.append(f"samples of step {step}, row {row + 1}: {shown[0]} in A, {shown[1]} in B")
    found.differences += wrong[:SHOWN]
    if not wrong and ours:
        found.same.append(f"{sum(len(lines) - 1 for lines in ours.values())} samples")


def _samples(folder: Path, from_step: int) -> dict[int, list[str]]:
    """Lines by step; the last is what follows the last end of a line, which is nothing in a whole file."""
    paths = ((path, path.stem.removeprefix("step_")) for path in (folder / "samples").glob("step_*.jsonl"))
    return {
        int(step): _text(path).split("\n") for path, step in paths if NUMBER.fullmatch(step) and int(step) >= from_step
    }


# Checkpoints and exports


def _common(a: Path, b: Path, from_step: int, found: Comparison) -> list[str]:
    """Folders of steps that both have. That one has more is no difference: a run keeps what it was told to keep."""
    ours, theirs = ({p.name for p in folder.glob("step_*") if NUMBER.fullmatch(p.name[5:])} for folder in (a, b))
    for name, only in (("A", ours - theirs), ("B", theirs - ours)):
        steps = sorted(int(each[5:]) for each in only if int(each[5:]) >= from_step)
        if steps:
            found.notes.append(f"{a.name} of steps {_ranges(steps)} are in {name} only")
    return sorted((each for each in ours & theirs if int(each[5:]) >= from_step), key=lambda each: int(each[5:]))


def _compare_checkpoints(a: Path, b: Path, found: Comparison) -> None:
    states, where = [], f"checkpoint {a.name}"
    for name, folder in (("A", a), ("B", b)):
        try:
            states.append(open_checkpoint(folder).state)
        except ValueError as error:
            found.differences.append(f"{where} in {name} is not complete: {'; '.join(str(error).splitlines())}")
    if len(states) < 2:
        return
    ours, theirs = states
    for key in STATE_FIELDS:
        values = (vars(ours)[key], vars(theirs)[key])
        if values[0] != values[1]:
            found.differences.append(f"{where}, {key}: {_values(*values)}")
    if ours.roles.keys() != theirs.roles.keys():
        found.differences.append(f"{where}: roles {sorted(ours.roles)} in A, {sorted(theirs.roles)} in B")
    from flowrl.workers.stored_files import logical_tensors

    counts, before = [], len(found.differences)
    for role in sorted(ours.roles.keys() & theirs.roles.keys()):
        pair = (logical_tensors(a / role), logical_tensors(b / role))
        counts.append(f"{role} {_compare_tensors(f'{where}, {role}', *pair, found)} tensors")
    if len(found.differences) == before:
        found.same.append(f"{where} ({', '.join(counts)})")


def _compare_exports(a: Path, b: Path, found: Comparison) -> None:
    before, count = len(found.differences), 0
    for folder in (a, b):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
    names = [{p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} for folder in (a, b)]
    for name in sorted(names[0] ^ names[1]):
        found.differences.append(f"export {a.name}: {name} is in {'A' if name in names[0] else 'B'} only")
    for name in sorted(names[0] & names[1]):
        if name.endswith(".safetensors"):
            count += _compare_tensors(f"export {a.name}, {name}", _weights(a / name), _weights(b / name), found)
        elif (a / name).read_bytes() != (b / name).read_bytes():
            found.differences.append(f"export {a.name}: {name} differs")
    if len(found.differences) == before:
        found.same.append(f"export {a.name} ({count} tensors)")


def _weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None


Named = Iterator[tuple[str, "torch.Tensor"]]


def _compare_tensors(where: str, a: Named, b: Named, found: Comparison) -> int:
    """Two sorted streams of tensors, one of each in memory at a time; how many names they have together."""
    count, shown = 0, 0
    one, two = next(a, None), next(b, None)
    while one is not None or two is not None:
        count += 1
        name = min(each[0] for each in (one, two) if each is not None)
        here, there = (each[1] if each is not None and each[0] == name else None for each in (one, two))
        if here is None or there is None:
            problem = f"in {'B' if here is None else 'A'} only"
        else:
            problem = _tensor_difference(here, there)
        if problem and shown < SHOWN:
            found.differences.append(f"{where}, {name}: {problem}")
            shown += 1
        one = next(a, None) if here is not None else one
        two = next(b, None) if there is not None else two
    return count


def _tensor_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Empty where shape, type and every bit are equal."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} in A, {tuple(b.shape)} {b.dtype} in B"
    if not a.numel():
        return ""
    rows = [each.contiguous().reshape(-1).view(torch.uint8).reshape(a.numel(), -1) for each in (a, b)]
    other = (rows[0] != rows[1]).any(dim=1)
    count = int(other.sum())
    if not count:
        return ""
    first = int(other.nonzero()[0])
    place = [int(each) for each in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
    values = _values(a.reshape(-1)[first].item(), b.reshape(-1)[first].item())
    return f"{count} of {a.numel()} elements, the first {place}: {values}"


# Words


def _values(a: Any, b: Any) -> str:
    text = f"{a!r} in A, {b!r} in B"
    if isinstance(a, int | float) and isinstance(b, int | float):
        try:
            largest = max(abs(a), abs(b))
            text += f", relative difference {abs(a - b) / largest if largest else 0.0:.1e}"
        except OverflowError:  # an integer that no float holds
            return text
    return text


def _shown(row: Mapping[str, Any], key: str) -> str:
    return repr(row[key]) if key in row else "absent"


def _encodable(text: str, encoding: str) -> str:
    """Names of files and metrics may hold what the console cannot show."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _ranges(steps: Mapping[int, Any] | Sequence[int]) -> str:
    """`0-4, 7` for 0, 1, 2, 3, 4, 7."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse(arguments: Sequence[str]) -> tuple[Path, Path, int]:
    """Error: `ValueError` with the usage."""
    words, from_step = list(arguments), "0"
    if "--from-step" in words:
        where = words.index("--from-step")
        from_step = words[where + 1] if where + 1 < len(words) else ""
        del words[where : where + 2]
    if not NUMBER.fullmatch(from_step):
        raise ValueError(f"--from-step {from_step}: give a step, 0 or more\n{USAGE}")
    if len(words) != 2 or any(word.startswith("-") for word in words):
        raise ValueError(f"two folders are compared; given: {' '.join(words) or 'none'}\n{USAGE}")
    return user_path(words[0]), user_path(words[1]), int(from_step)


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 where all is equal, 1 where something differs, 2 for a wrong input."""
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    try:
        found = compare(*parse(arguments))
    except (ValueError, OSError) as error:
        sys.stderr.write(_encodable(f"{error}\n", sys.stderr.encoding))
        return EXIT_BAD_INPUT
    try:
        sys.stdout.write(_encodable(found.table(), sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; the interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DIFFERENT if found.differences else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
