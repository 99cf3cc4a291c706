"""Elements of HTML as Python calls; whatever is not markup already is escaped."""

from __future__ import annotations

from html import escape

__all__ = ["Markup", "element"]

EMPTY = ("meta", "br")


class Markup(str):
    """Text that is markup and stays as it is."""

    __slots__ = ()


def element(name: str, /, *inside: str, **attributes: str | float | None) -> Markup:
    """Make an element; `class_` is class, `data_x` is data-x, and None leaves an attribute out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in EMPTY:
        return Markup(f"<{name}{said}>")
    return Markup(
        f"<{name}{said}>{''.join(one if isinstance(one, Markup) else escape(one) for one in inside)}</{name}>"
    )
