"""Every way of getting the command line wrong ends in one message and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import scenarios
from launch import arguments, command
from launch import config as configuration

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Return a function that types a command line in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = command.run(words)
        said = capsys.readouterr()
        assert Path.cwd() == tmp_path
        return code, said.out, said.err

    return run


WRONG = [
    ("scenario=prob", "no scenario named 'prob'; nearest: probe\ntype `make list` to see all "),
    ("scenario=clip", "no scenario named 'clip'; with that in its name: clip_allreduce, clip_"),
    ("scenario=_hidden", "no scenario named '_hidden'"),
    ("scenario=../probe", "no scenario named '../probe'; nearest: probe"),
    ("scenario=Probe", "no scenario named 'Probe'; nearest: probe"),
    ("scenario=", "no scenario chosen\ntype scenario=NAME; `make list` says what each of the "),
    ("scenario=null", "no scenario chosen\ntype scenario=NAME"),
    ("gpu=4", "no key 'gpu'; nearest: gpus\nlegal: device, dry_run, gpus, "),
    ("scenario.stpes=3", "no key 'scenario.stpes'; nearest: scenario.steps"),
    ("stpes=3", "no key 'stpes'; nearest: scenario.steps"),
    ("hydranope=3", "no key 'hydranope'"),
    ("=3", "no key ''"),
    ("SEED=3", "no key 'SEED'"),
    ("launch=wram", "no launch named 'wram'; nearest: warm; legal: auto, torchrun, warm"),
    ("launch.engine=wram", "launch.engine='wram' is not legal; nearest: warm; legal: auto, warm"),
    ("launch=null", "launch cannot be empty; legal: auto, torchrun, warm"),
    ("launch@foo=warm", "launch@foo=warm: a group has one place here; type launch=NAME"),
    ("launch={port:5}", "no launch named '{port:5}'"),
    ("tracker=wandbb", "no tracker named 'wandbb'; nearest: wandb"),
    ("tracker=null", "tracker cannot be empty"),
    ("device=cud", "device='cud' is not legal; nearest: cuda, cpu; legal: auto, cpu, cuda"),
    ("gpus=0", "gpus=0: this scenario needs at least 1 rank; type gpus=1"),
    ("gpus=-1", "gpus=-1: this scenario needs at least 1 rank; type gpus=1"),
    ("gpus=two", "gpus='two' is not a whole number"),
    ("gpus=2.5", "gpus=2.5 is not a whole number"),
    ("gpus=true", "gpus=True is not a whole number"),
    ("gpus=[2]", "gpus=[2] is not a whole number"),
    ("gpus=null", "gpus=None is not a whole number"),
    ("gpus=", "gpus='' is not a whole number"),
    ("gpus=???", "gpus: Missing mandatory value"),
    ("gpus=${foo}", "gpus: Interpolation key 'foo' not found"),
    ("gpus=${nope:1}", "gpus: Unsupported interpolation type nope"),
    ("scenario.steps=0", "scenario.steps=0 is too small: at least 1"),
    ("scenario.steps=x", "scenario.steps='x' is not a whole number"),
    ("scenario.steps=1.5", "scenario.steps=1.5 is not a whole number"),
    ("scenario.steps=null", "scenario.steps=None is not a whole number"),
    ("scenario.steps=???", "scenario.steps: Missing mandatory value"),
    ("scenario.steps.x=4", "no key 'scenario.steps.x'; nearest: scenario.steps"),
    ("scenario.sizes=3", "scenario.sizes=3 is not a list, each item a whole number"),
    ("scenario.sizes=[1,x]", "scenario.sizes=[1, 'x'] is not a list, each item a whole number"),
    ("scenario.sizes=[1,0]", "scenario.sizes=[1, 0] is too small: at least 1"),
    (
        "scenario.sizes=1,2",
        "names several values: type make sweep for all of them, or "
        "scenario.sizes=[1,2] for one list",
    ),
    ("seed=range(1,3)", "seed=range(1,3) names several values: type make sweep"),
    ("launch=warm,torchrun", "names several values: type make sweep for all of them, or one of"),
    ("scenario.label=3", "scenario.label=3 is not a text or null"),
    ("scenario.fault=explode", "scenario.fault=explode is not legal; legal: none, raise, exit"),
    ("seed=-1", "seed=-1 is not a whole number from 0 to 2^63-1"),
    ("seed=9223372036854775808", "is not a whole number from 0 to 2^63-1"),
    ("launch.port=65536", "launch.port=65536 is not a port from 0 (any) to 65535"),
    ("launch.port=x", "launch.port='x' is not a port"),
    ("launch.arm_timeout_s=0", "launch.arm_timeout_s=0 is not a number of seconds above 0"),
    ("launch.arm_timeout_s=nan", "launch.arm_timeout_s=nan is not a number of seconds above 0"),
    ("launch.collective_timeout_s=inf", "launch.collective_timeout_s=inf is not a number of sec"),
    ("launch.collective_timeout_s=[1]", "launch.collective_timeout_s=[1] is not a number of sec"),
    ("results=3", "results=3 is not a directory name: type results=./DIR"),
    ("results=", "results='' is not a directory name"),
    ("quiet=yes", "quiet='yes' is neither true nor false"),
    ("dry_run=1", "dry_run=1 is neither true nor false"),
    ("+gpus=4", "+gpus=4: no key can be added or taken away; type gpus=VALUE to set one"),
    ("++gpus=4", "++gpus=4: no key can be added or taken away"),
    ("+extra=1", "+extra=1: no key can be added or taken away"),
    ("~gpus", "~gpus: no key can be added or taken away"),
    ("~scenario.steps", "~scenario.steps: no key can be added or taken away"),
    ("~launch", "~launch: no key can be added or taken away"),
    ("gpus", "'gpus' is not key=value"),
    ("gpus=[1", "cannot read 'gpus=[1'"),
    ("gpus={", "cannot read 'gpus={'"),
]


@pytest.mark.parametrize(("word", "message"), WRONG, ids=[word for word, _ in WRONG])
def test_one_wrong_word_is_one_message(typed, tmp_path, word, message):
    code, out, err = typed("scenario=probe", word)

    assert code == 2
    assert err.startswith("crossrank: ")
    assert message in err
    assert err.count("crossrank: ") == 1
    assert "Traceback" not in err
    assert "HYDRA_FULL_ERROR" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpus=10000"], "gpus=10000: at most 128 CPU ranks on one machine"),
        (["device=cuda", "gpus=64"], "device=cuda gpus=64 needs 64 CUDA devices, this machine has"),
    ],
)
def test_what_this_machine_lacks_is_a_prerequisite(typed, tmp_path, words, message):
    code, out, err = typed("scenario=probe", *words)

    assert code == 12
    assert message in err
    assert "type " in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_no_scenario_says_where_they_are_listed(typed):
    code, _, err = typed("gpus=2")

    assert code == 2
    assert "no scenario chosen" in err
    assert "type scenario=NAME; `make list` says" in err


@pytest.mark.parametrize("word", ["gpus=2", "scenario=", "scenario=nonsense", "scenario=prob"])
def test_a_wrong_name_is_no_wall_of_all_names(typed, word):
    _, _, err = typed(word)

    shown = [name for name in scenarios.names() if name in err.split()]
    assert len(shown) <= 3
    assert len(err) < 200


def test_every_violation_is_named_at_once(typed):
    code, _, err = typed(
        *("scenario=probe", "gpu=3", "+seed=4", "quiet", "launch=wram", "scenario.stpes=1"),
        *("gpus=0", "seed=-1", "scenario.steps=0", "device=cud", "launch.port=99999"),
    )

    assert code == 2
    expected = ["'gpu'", "+seed=4", "'quiet'", "'wram'", "'scenario.stpes'"]
    expected += ["gpus=0", "seed=-1", "scenario.steps=0", "device='cud'", "launch.port=99999"]
    assert [word for word in expected if word not in err] == []
    assert err.count("crossrank: ") == 1


def test_an_unknown_scenario_does_not_hide_other_mistakes_nor_invent_any(typed):
    _, _, err = typed("scenario=prob", "gpus=0", "scenario.steps=0")

    assert "no scenario named 'prob'" in err
    assert "gpus=0" in err
    assert "scenario.steps" not in err
    assert "no scenario chosen" not in err


def test_nothing_typed_is_lost(typed):
    code, out, _ = typed(
        *("scenario=probe", "gpus=3", "seed=7", "device=cpu", "launch=torchrun"),
        *("scenario.steps=5", "scenario.scale=1", "scenario.sizes=[4,5]", "launch.port=29511"),
        *("scenario.label='a: {b} $HOME, c'", "json=true", "dry_run=true"),
    )

    assert code == 0
    plan = yaml.safe_load(out)
    assert (plan["world_size"], plan["seed"], plan["device"]) == (3, 7, "cpu")
    assert plan["engine"] == "torchrun"
    params = plan["params"]
    assert (params["steps"], params["scale"], params["sizes"]) == (5, 1, [4, 5])
    assert params["label"] == "a: {b} $HOME, c"


def test_a_dry_run_shows_the_arms_and_the_command_and_writes_nothing(typed, tmp_path):
    code, out, _ = typed("scenario=probe", "gpus=3", "dry_run=true", "launch.port=29511")

    assert code == 0
    for word in ("alone", "isolated", "--nproc-per-node=3", "--master-port=29511"):
        assert word in out
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_this_project_is_not_taken_for_one_of_the_user(typed, monkeypatch):
    def broken(*arguments: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(configuration, "violations", broken)

    with pytest.raises(LookupError, match="a bug"):
        typed("scenario=probe", "dry_run=true")


def test_help_shows_keys_groups_and_exit_codes(typed, tmp_path):
    code, out, err = typed("--help")

    assert (code, err) == (0, "")
    for word in (
        "gpus: 2",
        "launch: auto, torchrun, warm",
        "tracker: none, wandb",
        "Exit codes: 0",
    ):
        assert word in out
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_shows_the_composed_configuration(typed, tmp_path):
    code, out, _ = typed("--cfg", "job", "scenario=probe", "scenario.steps=9", "launch=torchrun")

    assert code == 0
    shown = yaml.safe_load(out)
    assert shown["scenario"]["steps"] == 9
    assert shown["launch"]["engine"] == "torchrun"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["-m"]])
def test_a_wrong_word_beside_a_flag_is_reported_all_the_same(typed, tmp_path, flags):
    code, _, err = typed(*flags, "scenario=probe", "gpu=3")

    assert code == 2
    assert "no key 'gpu'; nearest: gpus" in err
    assert list(tmp_path.iterdir()) == []


def test_multirun_composes_every_combination(typed):
    code, out, _ = typed("-m", "scenario=probe", "gpus=1,3", "seed=4,5", "dry_run=true")

    assert code == 0
    assert [point for point in ("gpus=1", "gpus=3", "seed=4", "seed=5") if point not in out] == []
    assert "4 points" in out


def test_flags_that_take_a_word_are_not_taken_for_overrides():
    flags, overrides = arguments.split(["--cfg", "job", "a=1", "-cn", "config", "-m", "b=2"])

    assert flags == ["--cfg", "job", "-cn", "config", "-m"]
    assert overrides == ["a=1", "b=2"]


def test_another_project_with_a_conf_of_its_own_does_no_harm(tmp_path):
    """Run as a user would, from a directory that has all our names, with nothing of ours in it."""
    for name in ("conf", "scenarios", "results_of_mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("gpus: nonsense\n")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}

    done = subprocess.run(
        [sys.executable, "-m", "launch", "scenario=probe", "dry_run=true", "json=true"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["world_size"] == 2
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_launcher_whose_streams_are_closed_runs_all_the_same(tmp_path):
    words = ["scenario=probe", "gpus=2", f"results={tmp_path}"]

    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "launch", *words],
        cwd=ROOT,
        timeout=120,
    )

    assert done.returncode == 0
    assert len(list(tmp_path.glob("probe/*/verdict.json"))) == 1


def test_a_scenario_without_its_yaml_says_so(tmp_path, monkeypatch, capsys):
    shutil.copy(ROOT / "tests" / "cases" / "probe.py", tmp_path / "lonely.py")
    monkeypatch.setenv("CROSSRANK_SCENARIOS", str(tmp_path))
    (tmp_path / "conf" / "scenario").mkdir(parents=True)

    code = command.run(["scenario=lonely", "dry_run=true"])

    assert code == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert str(tmp_path / "conf" / "scenario" / "lonely.yaml") in err
