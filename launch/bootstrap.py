"""Make the virtual environment that everything else runs in; needs nothing but a Python.

A Python that already has torch keeps it: the environment then sees its packages. Otherwise the
pinned torch is installed. The Makefile calls this when its stamp is older than what it was made
from. Written so that even Python 3.6 reads it, and can be told that it is too old.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import site
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import IO, Any, Dict, List, NoReturn, Optional, Sequence

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 10), (3, 13)
OLDEST_TORCH = (2, 9)
QUIET = ["--quiet", "--quiet"]
"""pip then says errors only; it would warn of every index folder that lacks a package."""
PROBE_S = 30
"""So long uv may take to find out whether its torch index answers."""

FIND = "import importlib.util as u; s = u.find_spec('torch'); print(s and s.origin or '')"
IMPORT = (
    "import json, torch; v = torch.version; "
    "print(json.dumps([torch.__version__, v.cuda, getattr(v, 'hip', None)]))"
)
_OURS = ".crossrank-"
"""How the names of our own files in an environment begin."""


class Folder:
    """Every path of the environment that is made here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / "bin" / "python"
        self.requirements = root / "requirements.txt"
        self.lock = root / f"{_OURS}lock"
        self.origin = root / f"{_OURS}origin"
        """Names the interpreter it was made from, and marks the folder as ours to wipe."""
        self.stamp = root / f"{_OURS}stamp"
        """Says what it was installed from; absent while anything is unfinished."""


def main(arguments: Sequence[str]) -> int:
    """Bring the environment named by the last argument up to date; return the exit code.

    `--default` before it says that nobody chose this interpreter: an environment that is there
    then keeps the one it was made from. `--check` alone only looks at the interpreter's version.
    """
    if "--check" in arguments:
        _check_version()
        return 0
    # resolve() would follow links: this only makes the path absolute.
    venv = Folder(Path(os.path.abspath(arguments[-1])))  # noqa: PTH100
    if "--again" not in arguments:
        _use_the_right_python(venv, chosen="--default" not in arguments)
    _check_version()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        _refuse_foreign(venv)
        with venv.lock.open("w") as lock:
            _wait_for(lock, venv)
            _bring_up_to_date(venv)
    except KeyboardInterrupt:
        _stop("interrupted; the next make starts the installation again", 130)
    except subprocess.CalledProcessError as error:
        _stop(
            f"this command failed with code {error.returncode}, its own message stands above:\n"
            f"  {' '.join(error.cmd)}\n"
            "the next make starts the installation again"
        )
    except OSError as error:
        _stop(f"cannot write {error.filename or venv.root}: {error.strerror or error}")
    return 0


_asked_to_end: Optional[int] = None
_starting = False


def _end(number: int, _frame: Optional[FrameType]) -> None:
    # An exception, unlike the signal's default, makes `_run` end pip too. Raised while a process
    # is being started it would leave one behind that nobody knows.
    global _asked_to_end
    _asked_to_end = number
    if not _starting:
        sys.exit(128 + number)


def _use_the_right_python(venv: Folder, chosen: bool) -> None:
    """Start again with the interpreter the environment was made from, if that one is meant."""
    inside = Path(sys.prefix).resolve() == venv.root.resolve()
    if (chosen and not inside) or not venv.origin.is_file():
        return
    origin = venv.origin.read_text().strip()
    if origin != sys.executable and os.access(origin, os.X_OK):
        os.execv(origin, [origin, __file__, "--again", *sys.argv[1:]])  # noqa: S606 not a shell


def _check_version() -> None:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < OLDEST:
        _stop(
            f"{sys.executable} is Python {version}; crossrank needs {OLDEST[0]}.{OLDEST[1]} "
            "or newer\n"
            f"type: make PYTHON={_newer_python() or '/path/to/python3.12'} ..."
        )
    if sys.version_info[:2] > NEWEST:
        _say(f"Python {version} is newer than what this version was tested with")


def _newer_python() -> Optional[str]:
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        path = shutil.which(f"python3.{minor}")
        # A version manager puts a file of that name there for versions it does not have.
        if path and subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return path
    return None


def _refuse_foreign(venv: Folder) -> None:
    """Make the folder; stop if somebody else's things are in it."""
    venv.root.mkdir(parents=True, exist_ok=True)
    # Another make, which has just begun here, may not have finished to write what marks it as ours.
    names = {path.name for path in venv.root.iterdir() if not path.name.startswith(_OURS)}
    if names and not venv.origin.exists():
        _stop(
            f"{venv.root} is there and was not made by this Makefile; nothing was changed\n"
            "type: make VENV=.venv-crossrank ...   (an environment of its own)\n"
            f"or:   make PYTHON={venv.python} VENV=.venv-crossrank ...   (one that uses its torch)"
        )


def _wait_for(lock: IO[str], venv: Folder) -> None:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        _say(f"another make is installing into {venv.root}; waiting for it")
        fcntl.lockf(lock, fcntl.LOCK_EX)


def _bring_up_to_date(venv: Folder) -> None:
    python = [sys.executable, list(sys.version_info[:3])]
    wanted = {"python": python, "inputs": _inputs()}
    found = _read_stamp(venv)
    if found == wanted and venv.python.exists():
        os.utime(str(venv.stamp))
        return
    _write(venv.origin, sys.executable)
    if venv.stamp.exists():
        venv.stamp.unlink()
    # Neither another Python nor what an interrupted installation left is built upon.
    if found.get("python") != python or not venv.python.exists():
        _wipe(venv)
        _create(venv)
    shared = _install_torch(venv)
    _install_the_rest(venv, shared)
    _write(venv.stamp, json.dumps(wanted))


def _inputs() -> str:
    digest = hashlib.sha256()
    for name in ("constraints.txt", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _read_stamp(venv: Folder) -> Dict[str, Any]:
    try:
        stamp = json.loads(venv.stamp.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def _wipe(venv: Folder) -> None:
    for path in venv.root.iterdir():
        if path in (venv.lock, venv.origin):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(str(path))
        else:
            path.unlink()


def _create(venv: Folder) -> None:
    version = ".".join(str(part) for part in sys.version_info[:3])
    _say(f"making {venv.root} from {sys.executable} ({version}), once; this takes a minute or more")
    nested = sys.prefix != sys.base_prefix
    options = ["--system-site-packages"] if _found_torch(Path(sys.executable)) else []
    _run([sys.executable, "-m", "venv", *options, str(venv.root)])
    if options and nested:
        # The system's packages of a nested environment are the base's, not the outer one's.
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        _write(Path(_ask(venv.python, ask)) / "outer.pth", "\n".join(lines))


def _install_torch(venv: Folder) -> bool:
    """See to it that there is a torch; return True if it is the one of the given Python."""
    found = _found_torch(venv.python)
    shared = bool(found) and venv.root not in Path(found).parents
    if shared:
        source = f"of {sys.executable}, used as it is"
    else:
        source = f"installed by {_fetch_torch(venv)}"
    try:
        version, cuda, hip = json.loads(_ask(venv.python, IMPORT).splitlines()[-1])
    except (subprocess.CalledProcessError, ValueError, IndexError):
        _stop(f"the torch {source} cannot be imported; type: make PYTHON=/another/python3 ...")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        _stop(
            f"torch {version} {source} is too old: crossrank needs {OLDEST_TORCH[0]}."
            f"{OLDEST_TORCH[1]} or newer and never replaces a torch that is there\n"
            "type: make PYTHON=/another/python3 ...   (or upgrade that torch)"
        )
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    _say(f"torch {version} ({build} build), {source}")
    return shared


def _fetch_torch(venv: Folder) -> str:
    """Install the pinned torch; return by what."""
    pin = next(line for line in _pins() if line.startswith("torch=="))
    uv = shutil.which("uv")
    if uv:
        # uv picks the build that fits the driver, but only where its index can be reached.
        command = [uv, "pip", "install", "--python", str(venv.python), "--torch-backend=auto"]
        quick = {**os.environ, "UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "5"}
        try:
            probe = subprocess.run(
                [*command, "--dry-run", "--quiet", pin],
                env=quick,
                timeout=PROBE_S,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if probe.returncode == 0:
                _run([*command, pin])
                return "uv"
        except subprocess.TimeoutExpired:
            pass
        except subprocess.CalledProcessError:
            _say("uv could not install torch; pip takes over")
    _pip(venv, pin, *([] if sys.stderr.isatty() else QUIET))
    return "pip"


def _install_the_rest(venv: Folder, shared: bool) -> None:
    environment = dict(os.environ)
    if shared:
        # A container's constraints keep its own packages as they are. Ours go beside them, into
        # this environment only, at the versions of constraints.txt.
        environment.pop("PIP_CONSTRAINT", None)
    # No package in the list depends on torch, so nothing here can replace it.
    _write(venv.requirements, "\n".join(pin for pin in _pins() if not pin.startswith("torch==")))
    _pip(venv, *QUIET, "-r", str(venv.requirements), environment=environment)
    editable = ("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    _pip(venv, *QUIET, *editable, environment=environment)


def _pins() -> List[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _pip(venv: Folder, *arguments: str, environment: Optional[Dict[str, str]] = None) -> None:
    ours = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [str(venv.python), "-m", "pip", "install", *arguments]
    _run(command, {**(os.environ if environment is None else environment), **ours})


def _found_torch(python: Path) -> str:
    """Return the file of the torch that an interpreter finds, or an empty text."""
    return _ask(python, FIND)


def _ask(python: Path, program: str) -> str:
    answer = subprocess.run(
        [str(python), "-W", "ignore", "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    return answer.stdout.strip()


def _run(command: List[str], environment: Optional[Dict[str, str]] = None) -> None:
    # The answers of `make` itself go to standard output; this is talk on the way to them.
    global _starting
    _starting = True
    try:
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    finally:
        _starting = False
    try:
        if _asked_to_end is not None:
            sys.exit(128 + _asked_to_end)
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def _say(text: str) -> None:
    print(f"crossrank: {text}", file=sys.stderr, flush=True)


def _stop(text: str, code: int = 1) -> NoReturn:
    _say(text)
    sys.exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
