"""Compose the configuration of one run from the files of conf/, for commands that are not Hydra's.

The same as `python -m launch scenario=NAME ...` composes, at a hundredth of the time: a corpus has
hundreds of configurations, in which only scenario and number of ranks differ.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.errors import UsageError
from launch import arguments
from launch import config as configuration
from launch.config import Config

OF_HYDRA = ("defaults", "hydra")


def compose(
    name: str,
    *,
    gpus: int,
    results: Path,
    seed: int = 0,
    device: str = "auto",
    launch: str = "auto",
    params: Mapping[str, Any] | None = None,
) -> Config:
    """Return the checked configuration of one run.

    Args:
        name: of the scenario.
        gpus: number of ranks.
        results: where run directories go.
        seed: of data, weights and permutations.
        device: auto, cpu or cuda.
        launch: option of the group `launch`: how ranks are started.
        params: values of parameters that are not to have their default.

    Raises:
        UsageError: if anything does not fit; says what to type.
    """
    data = _top()
    data |= {"gpus": gpus, "device": device, "seed": seed, "results": str(results)}
    cfg = OmegaConf.create(data)
    cfg.scenario = values(name) | dict(params or {})
    cfg.launch = _file("launch", launch)
    cfg.tracker = {}
    return configuration.read(cfg, choices={"scenario": name, "tracker": "none"})


def values(name: str) -> dict[str, Any]:
    """Return the default values of a scenario's parameters, wherever they are kept.

    Raises:
        UsageError: if there are none.
    """
    return _file("scenario", name)


def _top() -> dict[str, Any]:
    data = _read(arguments.CONF / "config.yaml")
    return {key: value for key, value in data.items() if key not in OF_HYDRA}


def _file(group: str, name: str) -> dict[str, Any]:
    for folder in arguments.conf_folders():
        path = folder / group / f"{name}.yaml"
        if path.exists():
            return copy.deepcopy(_read(path))
    raise UsageError(f"{group} {name} has no values: there is no {group}/{name}.yaml in conf/")


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    # Reading YAML takes as long as all the rest, and each file is needed for every number of ranks.
    data: Any = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no key: value lines")
    return {str(key): value for key, value in data.items()}
