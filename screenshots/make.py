"""Make the pictures of the console: `python screenshots/make.py [--demo] [--out DIR] [NAME ...]`.

A scene is a size, a fleet and what is pressed; each becomes an SVG, and a PNG where rsvg-convert is installed (Debian:
librsvg2-bin, fonts-firacode, fonts-dejavu-core). The scenes show made-up hosts, so that every state is seen; with
--demo they show the virtual host, its real processes and a real reset.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from textual.pilot import Pilot

    from tui.console import FleetLike

ROOT = Path(__file__).resolve().parent.parent
TEXT = re.compile(r'x="([\d.]+)"([^>]*?)textLength="([\d.]+)"([^>]*)>((?:&#160;)*)([^<]*?)((?:&#160;)*)</text>')
CELL = 12.2
"""The width of a character in Textual's SVG."""
SIZES = {"80x24": (80, 24), "120x40": (120, 40), "200x60": (200, 60)}
RESET = ("R", "until:KILLS", "right", "enter", "until:by GPU")


@dataclass(frozen=True)
class Scene:
    """One picture: keys are pressed in order; a key that starts with "until:" waits for that text on the screen,
    one that starts with "wait:" for so many seconds, so that the lines of a live host have a history."""

    name: str
    size: str
    keys: tuple[str, ...] = ()
    no_color: bool = False


SCENES = (
    *(Scene("fleet", size) for size in SIZES),
    Scene("fleet-no-color", "80x24", no_color=True),
    Scene("wall", "200x60"),
    Scene("mixed", "120x40"),
    Scene("first", "80x24"),
    *(Scene("host", size, ("enter",)) for size in ("80x24", "120x40")),
    *(Scene("reset-plan", size, ("R", "until:KILLS")) for size in SIZES),
    *(Scene("reset-running", size, ("R",)) for size in SIZES),
    *(Scene("reset-clean", size, RESET) for size in SIZES),
    *(Scene("reset-not-clean", size, RESET) for size in SIZES),
    Scene("reset-nothing", "80x24", ("R", "until:NOTHING")),
    *(Scene("launch", size, ("L", "until:gate")) for size in ("80x24", "120x40")),
    Scene("launch-refused", "80x24", ("L", "until:FAIL")),
    *(Scene("shards", size, ("S", "until:data_", "down", "enter", "until:bf16")) for size in ("80x24", "120x40")),
    Scene("log", "80x24", ("O", "until:step")),
    Scene("host-key", "80x24", ("C", "until:SHA256")),
    Scene("help", "80x24", ("question_mark",)),
    Scene("palette", "80x24", ("ctrl+p",)),
)

SEEN = ("until: 7 OK", "until:sglang", "wait:10")
ZEROS = (*SEEN, "R", "until:KILLS", "right", "enter", "until:by GPU")
EXTRACT = (
    *ZEROS, "escape", "L", "until:gate of serve is open", "down", "until:gate of extract is open", "enter", "enter",
    "until:of the tokens", "until: samples/s", "until:_0-", "wait:15",
)  # fmt: skip
DEMO_SCENES = (
    *(Scene("demo-fleet", size, SEEN) for size in SIZES),
    Scene("demo-fleet-no-color", "120x40", SEEN, no_color=True),
    *(Scene("demo-reset-plan", size, (*SEEN, "R", "until:KILLS")) for size in SIZES),
    Scene("demo-launch-refused", "120x40", (*SEEN, "L", "until:FAIL")),
    Scene("demo-eight-zeros", "120x40", ZEROS),
    *(Scene("demo-extract", size, EXTRACT) for size in SIZES),
    *(Scene("demo-shard", size, (*EXTRACT, "S", "until:rows_0", "f", "until:aux_hidden")) for size in SIZES),
    *(Scene("demo-timeline", size, (*EXTRACT, "T", "until:rate")) for size in SIZES),
)  # fmt: skip
"""Scenes on the virtual host; what is waited for is what the host really does."""


def fake_fleet(name: str) -> AbstractContextManager[FleetLike]:
    """Give a made-up fleet for a scene."""
    from tests.fakescenes import scene_fleet

    return scene_fleet(name)


def demo_fleet(name: str) -> AbstractContextManager[FleetLike]:
    """Put up the demo's virtual host for a scene."""
    from backend.virtual import demo

    return demo.fleet(256)


@contextmanager
def colours(no_color: bool) -> Iterator[None]:
    """Set or clear NO_COLOR while the app is made."""
    before = os.environ.pop("NO_COLOR", None)
    if no_color:
        os.environ["NO_COLOR"] = "1"
    try:
        yield
    finally:
        os.environ.pop("NO_COLOR", None)
        if before is not None:
            os.environ["NO_COLOR"] = before


def on_screen(pilot: Pilot[None]) -> str:
    """Return the text that the terminal shows."""
    strips = pilot.app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in strips)


async def press(pilot: Pilot[None], key: str, timeout_s: float = 60.0) -> None:
    """Press one key, or wait for a text."""
    if key.startswith("wait:"):
        await pilot.pause(float(key.removeprefix("wait:")))
        return
    if not key.startswith("until:"):
        await pilot.press(key)
        await pilot.pause()
        return
    text, end = key.removeprefix("until:"), asyncio.get_running_loop().time() + timeout_s
    while text not in on_screen(pilot):
        if asyncio.get_running_loop().time() > end:
            raise TimeoutError(f"`{text}` does not appear:\n{on_screen(pilot)}")
        await pilot.pause(0.05)


async def shoot(scene: Scene, factory: Callable[[str], AbstractContextManager[FleetLike]], out: Path) -> Path:
    """Draw one scene into an SVG."""
    from tui.app import EightZeros

    with colours(scene.no_color), factory(scene.name) as fleet:
        app = EightZeros(fleet)
        async with app.run_test(size=SIZES[scene.size]) as pilot:
            await pilot.pause(0.4)
            for key in scene.keys:
                await press(pilot, key)
            await pilot.pause(0.3)
            app.clear_notifications()
            await pilot.pause(0.1)
            path = out / f"{scene.name}-{scene.size}.svg"
            path.write_text(app.export_screenshot(title="eightzeros"), "utf-8")
    return path


def tighten(text: re.Match[str]) -> str:
    """Turn the spaces around a text into its place and length: rsvg-convert drops them and stretches the rest."""
    before, after = text[5].count("&#160;") * CELL, text[7].count("&#160;") * CELL
    if not text[6]:
        return text[0]
    length = float(text[3]) - before - after
    return f'x="{float(text[1]) + before:g}"{text[2]}textLength="{length:g}"{text[4]}>{text[6]}</text>'


def to_png(path: Path) -> None:
    """Turn an SVG into a PNG where the tool is there."""
    tool = shutil.which("rsvg-convert")
    if tool:
        svg = re.sub(TEXT, tighten, path.read_text("utf-8"))
        target = str(path.with_suffix(".png"))
        subprocess.run([tool, "-z", "1", "-o", target], input=svg.encode(), check=True)


def main() -> None:
    """Draw the named scenes, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="store_true", help="draw the virtual host instead of made-up ones")
    parser.add_argument("--out", type=Path, default=ROOT / "screenshots")
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    scenes, factory = (DEMO_SCENES, demo_fleet) if chosen.demo else (SCENES, fake_fleet)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for scene in scenes:
        label = f"{scene.name}-{scene.size}"
        if chosen.names and scene.name not in chosen.names and label not in chosen.names:
            continue
        path = asyncio.run(shoot(scene, factory, chosen.out))
        to_png(path)
        print(path)


if __name__ == "__main__":
    main()
