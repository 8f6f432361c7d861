"""The console's own colours: dark and quiet, so that a colour means something when there is one."""

from __future__ import annotations

from textual.theme import Theme

EIGHTZEROS = Theme(
    name="eightzeros",
    primary="#7aa2c4",
    secondary="#8793a1",
    accent="#7fb4d8",
    foreground="#c3cad3",
    background="#0f1216",
    surface="#14181e",
    panel="#1b2027",
    success="#7dae7f",
    warning="#d6a653",
    error="#e0695f",
    dark=True,
    variables={
        "text-muted": "#818b97",
        "unknown": "#ab92cf",
        "faint": "#4a525d",
        "track": "#313841",
        "spark": "#46627a",
        "footer-key-foreground": "#7fb4d8",
        "scrollbar": "#2a313a",
        "scrollbar-background": "#14181e",
        "scrollbar-background-hover": "#14181e",
        "scrollbar-background-active": "#14181e",
        "scrollbar-hover": "#3a434e",
        "scrollbar-active": "#4a5561",
        "scrollbar-corner-color": "#14181e",
        "border": "#39424d",
        "border-blurred": "#262d35",
        "input-selection-background": "#7fb4d8 30%",
        "block-cursor-background": "#24384a",
        "block-cursor-foreground": "#e6ebf0",
    },
)
DEFAULTS = {"unknown": "#ab92cf", "faint": "#59626d", "track": "#3a424c", "spark": "#46627a"}
"""What another theme lacks of our variables."""
