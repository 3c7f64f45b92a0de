"""Where the answer goes besides the terminal: JSON, JUnit XML, a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.watch.answers.answer import Answer


def publish(answer: Answer, outputs: Outputs) -> list[str]:
    """Write an answer where it was asked for and into the folder that is kept, if one is.

    Returns:
        A line to show below the answer for each that could not be written.
    """
    failed = outputs.write(answer)
    if answer.kept is not None:
        kept = Outputs(json=f"{answer.kept}/watch.json", html=f"{answer.kept}/watch.html")
        failed += kept.write(answer)
    return [f"  note     {one}" for one in failed]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Paths that were typed; None is not written."""

    json: str | None = None
    junit: str | None = None
    html: str | None = None

    def absolute(self) -> Outputs:
        """Return them as they are meant now, before the script changes the directory."""
        return Outputs(
            **{name: path and str(Path(path).absolute()) for name, path in vars(self).items()}
        )

    def write(self, answer: Answer) -> list[str]:
        """Write all of them; return a sentence on each that could not be written."""
        # Not earlier: a script is to find no more modules imported than it would alone.
        from harness.watch.answers.junit import junit
        from harness.watch.answers.page import page

        failed = []
        contents: tuple[tuple[str | None, Callable[[], str]], ...] = (
            (self.json, lambda: json.dumps(answer.to_json(), indent=1) + "\n"),
            (self.junit, lambda: junit(answer)),
            (self.html, lambda: page(answer)),
        )
        for path, content in contents:
            if path is None:
                continue
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(content(), encoding="utf-8")
            except OSError as error:
                failed.append(f"could not write {path}: {error.strerror}")
        return failed
