"""Which keys of two configurations differ so that a run which goes on with the second would not end as with the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from flowrl.config.compose import Recipe, to_yaml
from flowrl.config.effect import effective
from flowrl.config.schema import VARIANTS, Config
from flowrl.config.tree import ConfigError, flatten, knobs, show

ABSENT = "(no such key)"


@dataclass(frozen=True)
class Change:
    """One key with both values, as one would write them on the command line."""

    key: str
    before: str
    now: str


def changes(before: str, config: Config) -> tuple[Change, ...]:
    """What `before`, a configuration as `to_yaml` wrote it, has otherwise than `config`, of the keys that change results.

    A knob is left out where the schema says that it is `free`, or where nothing reads it. A key that only one of the two
    has counts; so a knob that an older version did not have is asked about. Where the variant of a config group differs,
    that is the change, and the variants' own keys are not compared.
    Error: `ConfigError` where the text is no configuration.
    """
    old, new = _flat(before), _flat(to_yaml(config))
    bound = _bound(config)
    found = []
    for key in [*new, *(key for key in old if key not in new)]:
        group = key.partition(".")[0]
        if group in VARIANTS:
            variant = f"{group}.variant"
            if key != variant and old.get(variant) != new.get(variant):
                continue
        elif not bound(key):
            continue
        values = [show(table[key]) if key in table else ABSENT for table in (old, new)]
        if values[0] != values[1]:
            found.append(Change(group if key == f"{group}.variant" else key, *values))
    return tuple(found)


def keys(config: Config) -> frozenset[str]:
    """Every key that a change can be of: the configuration's, those of the built-in variants, and the config groups."""
    variants = (knobs(kind, f"{group}.") for group, kinds in Recipe().variants().items() for kind in kinds.values())
    return frozenset([*_flat(to_yaml(config)), *VARIANTS, *(key for table in variants for key in table)])


def _bound(config: Config) -> Callable[[str], bool]:
    """Whether a key of the fixed tree binds a resumed run."""
    known = knobs(Config)
    read = effective(config, known)
    decaying = any(section.optim.schedule != "constant" for section in (config.actor, config.critic))

    def bound(key: str) -> bool:
        if key == "trainer.total_steps":
            # A schedule is stretched over all steps.
            return decaying
        return key not in known or key in read and not known[key].free

    return bound


def _flat(text: str) -> Mapping[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"not a configuration: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError("not a configuration: no mapping of sections")
    return flatten({str(key): value for key, value in tree.items()}, {})
