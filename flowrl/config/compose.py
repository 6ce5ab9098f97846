"""From a command line to the frozen tree: Hydra composes, types are checked strictly, `auto` is resolved, rules hold."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from flowrl.config.machine import Machine, find_machine
from flowrl.config.model_shape import ModelShape, shape_of
from flowrl.config.redact import redact
from flowrl.config.resolve import Shapes, resolve
from flowrl.config.rules import Facts, problems
from flowrl.config.schema import AUTO, VARIANTS, Config
from flowrl.config.tree import (
    ConfigError,
    Knob,
    build,
    checked,
    flatten,
    knobs,
    nearest,
    nested,
    refusal,
    sections,
    show,
    table,
)

__all__ = ["Composed", "ConfigError", "Recipe", "compose", "compose_all", "from_yaml", "to_tree", "to_yaml"]

GROUP_DEFAULTS = {"algorithm": "gae", "kl": "reward"}


@dataclass(frozen=True)
class Recipe:
    """What a driver of its own changes: the algorithms it serves and its defaults.

    `algorithm` maps names to types derived from `schema.Algorithm`; it replaces the built-in ones, as a driver serves
    only the dataflow it spells out (list built-in ones again to keep them). `defaults` are overrides in Hydra's
    grammar that come before the user's, so the user's win.
    """

    algorithm: Mapping[str, type] = field(default_factory=dict)
    defaults: tuple[str, ...] = ()

    def variants(self) -> dict[str, dict[str, type]]:
        """The types of each config group."""
        return {**VARIANTS, "algorithm": dict(self.algorithm) or VARIANTS["algorithm"]}


@dataclass(frozen=True)
class Composed:
    """The resolved tree and what it was made from; `given` are the keys on the command line."""

    config: Config
    shapes: Shapes
    machine: Machine
    given: frozenset[str]


def compose(argv: Sequence[str], *, recipe: Recipe | None = None) -> Config:
    """The configuration that the overrides `argv` describe. Error: `ConfigError`, one message for all it found."""
    return compose_all(argv, recipe=recipe).config


def compose_all(argv: Sequence[str], *, recipe: Recipe | None = None, machine: Machine | None = None) -> Composed:
    """`compose`, with everything that the plan needs beside the tree."""
    recipe = recipe or Recipe()
    groups = recipe.variants()
    overrides = _parse(argv)
    chosen = _choices(overrides, groups, recipe)
    known = _known(groups, chosen)
    _check_keys(overrides, known, groups, chosen)
    defaults = [text for text in recipe.defaults if _applies(text, groups, chosen)]
    values = _typed(_hydra([*defaults, *argv], groups, chosen), known)
    given = frozenset(key for override in overrides for key in _keys(override, known))
    machine = machine or find_machine()
    shapes = _shapes(values)
    values = resolve(values, shapes, machine, datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f"))
    config = build(values, {group: groups[group][name] for group, name in chosen.items()})
    found = problems(config, Facts(shapes, machine, given, values))
    if found:
        raise ConfigError(*found)
    return Composed(config, shapes, machine, given)


def _parse(argv: Sequence[str]) -> list[Override]:
    parsed, wrong = [], []
    for text in argv:
        if text.startswith("-"):
            wrong.append(f"{text} is not an option; options are --help and KEY=VALUE")
            continue
        try:
            parsed.extend(OverridesParser.create().parse_overrides([text]))
        except HydraException as error:
            wrong.append(
                f"cannot read {text!r}: {_one_line(error)}; write KEY=VALUE, with quotes inside quotes for odd text: KEY=\"'a=b'\""
            )
    if wrong:
        raise ConfigError(*wrong)
    return parsed


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and line != "^" and not line.startswith("See http"))


def _choices(overrides: Sequence[Override], groups: Mapping[str, Mapping[str, type]], recipe: Recipe) -> dict[str, str]:
    """The variant of each group: the user's, else the recipe's, else the default."""
    chosen = {
        group: GROUP_DEFAULTS[group] if GROUP_DEFAULTS[group] in types else next(iter(types))
        for group, types in groups.items()
    }
    wrong = []
    for override in [*_parse(recipe.defaults), *overrides]:
        group = override.key_or_group
        if group not in groups or override.type not in (OverrideType.CHANGE, OverrideType.FORCE_ADD):
            continue
        name = None if override.is_sweep_override() else override.value()
        if isinstance(name, str) and name in groups[group]:
            chosen[group] = name
        else:
            given = override.get_value_string()
            wrong.append(
                f"{group}={given} is not legal; legal: {' | '.join(groups[group])}{nearest(given, groups[group])}"
            )
    if wrong:
        raise ConfigError(*wrong)
    return chosen


def _known(groups: Mapping[str, Mapping[str, type]], chosen: Mapping[str, str]) -> dict[str, Knob]:
    known = knobs(Config)
    for group, name in chosen.items():
        known |= knobs(groups[group][name], f"{group}.")
    return known


def _check_keys(
    overrides: Sequence[Override],
    known: Mapping[str, Knob],
    groups: Mapping[str, Mapping[str, type]],
    chosen: Mapping[str, str],
) -> None:
    wrong = []
    for override in overrides:
        key, text = override.key_or_group, override.input_line or ""
        whole = key in groups or key in sections(Config)
        if override.type == OverrideType.DEL:
            wrong.append(f"{text}: no key can be removed")
        elif key not in known and not whole:
            wrong.append(_unknown(key, known, groups, chosen))
        elif override.type == OverrideType.ADD:
            wrong.append(f"{text}: {key} exists; write it without the +")
        elif override.package is not None:
            wrong.append(f"{text}: packages (@) have no meaning here")
        elif override.is_sweep_override():
            wrong.append(
                f"{text}: one run takes one value; a list is written {key}=[a,b], text with commas {key}=\"'a,b'\""
            )
        elif key in known and isinstance(override.value(), dict):
            wrong.append(refusal(known[key], override.value()))
        elif key in sections(Config):
            value = override.value()
            if not isinstance(value, dict):
                wrong.append(
                    f"{text}: {key} is a section; set its keys, as in {next(k for k in known if k.startswith(key + '.'))}=..."
                )
            else:
                wrong += [_unknown(name, known, groups, chosen) for name in _keys(override, known) if name not in known]
    if wrong:
        raise ConfigError(*wrong)


def _keys(override: Override, known: Mapping[str, Knob]) -> list[str]:
    """The leaves that an override sets."""
    value = override.value()
    return (
        list(flatten(nested({override.key_or_group: value}), known))
        if isinstance(value, dict)
        else [override.key_or_group]
    )


def _unknown(
    key: str, known: Mapping[str, Knob], groups: Mapping[str, Mapping[str, type]], chosen: Mapping[str, str]
) -> str:
    group, _, name = key.partition(".")
    if group in groups:
        others = [variant for variant, cls in groups[group].items() if key in knobs(cls, f"{group}.")]
        if others:
            has = " and ".join(f"{group}={variant}" for variant in others)
            return f"{key} belongs to {has}; this run has {group}={chosen[group]}, which has no {name}"
    return f"unknown key {key}{nearest(key, [*known, *groups])}"


def _applies(default: str, groups: Mapping[str, Any], chosen: Mapping[str, str]) -> bool:
    """Whether a recipe's default still makes sense: a knob of a variant that the user replaced does not."""
    key = default.partition("=")[0]
    group = key.partition(".")[0]
    if group not in groups:
        return True
    return group != key and key in knobs(groups[group][chosen[group]], f"{group}.")


def _hydra(
    overrides: Sequence[str], groups: Mapping[str, Mapping[str, type]], chosen: Mapping[str, str]
) -> dict[str, Any]:
    """Hydra's composition as nested plain containers, interpolations resolved."""
    store = ConfigStore.instance()
    for group, types in groups.items():
        for name, cls in types.items():
            store.store(group=group, name=name, node=nested(_defaults(cls)))
    order = [*({group: name} for group, name in chosen.items()), "_self_"]
    store.store(name="flowrl", node={"defaults": order, **nested(_defaults(Config))})
    try:
        with initialize(version_base=None, config_path=None, job_name="flowrl"):
            tree = OmegaConf.to_container(hydra_compose("flowrl", overrides=list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from None
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _defaults(cls: type) -> dict[str, Any]:
    return {key: knob.default for key, knob in knobs(cls).items()}


def _typed(tree: Mapping[str, Any], known: Mapping[str, Knob]) -> dict[str, Any]:
    """Every key with a checked value. Error: `ConfigError` with all that are wrong, unknown or missing."""
    flat = flatten(tree, known)
    wrong = [f"unknown key {key}{nearest(key, known)}" for key in flat if key not in known]
    values: dict[str, Any] = {}
    for key, knob in known.items():
        try:
            values[key] = checked(knob, flat[key])
        except KeyError:
            wrong.append(f"{key} is missing; legal: {knob.legal}")
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError(*wrong)
    return values


def _shapes(values: Mapping[str, Any]) -> Shapes:
    found: dict[str, ModelShape] = {}
    read: dict[str, ModelShape] = {}
    wrong: dict[str, str] = {}
    for role, key in (("policy", "model.path"), ("critic", "critic.path"), ("reference", "reference.path")):
        path = values[key] if values[key] != AUTO else values["model.path"]
        try:
            found[role] = read[path] = read[path] if path in read else shape_of(path)
        except ValueError as error:
            wrong.setdefault(path, f"{key}={show(path)}: {error}")
    if wrong:
        raise ConfigError(*wrong.values())
    return Shapes(**found)


def to_tree(config: Config, *, recipe: Recipe | None = None) -> dict[str, Any]:
    """The configuration as nested plain containers, without secrets; a config group says its choice under `variant`.

    Whatever writes or sends the configuration (`config.yaml`, `dry_run`, checkpoints, trackers) gets it from here.
    """
    groups = (recipe or Recipe()).variants()
    tree = nested(table(config))
    for group, chosen in (("algorithm", config.algorithm), ("kl", config.kl)):
        names = [name for name, cls in groups[group].items() if cls is type(chosen)]
        tree[group] = {"variant": names[0] if names else type(chosen).__name__.lower(), **tree.get(group, {})}
    return {key: redact(value, key) for key, value in tree.items()}


def to_yaml(config: Config, *, recipe: Recipe | None = None) -> str:
    """The resolved configuration as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_tree(config, recipe=recipe)))


def from_yaml(text: str, *, recipe: Recipe | None = None) -> Config:
    """The configuration that `to_yaml` wrote, types checked. Error: `ConfigError`."""
    groups = (recipe or Recipe()).variants()
    try:
        raw = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(f"not a configuration: {_one_line(error)}") from None
    if not isinstance(raw, dict):
        raise ConfigError("not a configuration: no mapping of sections")
    tree = {str(key): value for key, value in raw.items()}
    chosen: dict[str, str] = {}
    for group, types in groups.items():
        section = dict(tree.pop(group, None) or {})
        variant = section.pop("variant", None)
        if variant not in types:
            raise ConfigError(f"{group}.variant={show(variant)} is not legal; legal: {' | '.join(types)}")
        chosen[group], tree[group] = variant, section
    values = _typed(tree, _known(groups, chosen))
    return build(values, {group: groups[group][name] for group, name in chosen.items()})
