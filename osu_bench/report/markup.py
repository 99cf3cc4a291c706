"""HTML and SVG elements built by function calls; other text is always escaped."""

from __future__ import annotations

from html import escape

__all__ = ["Markup", "join", "tag"]

VOID = ("meta", "br", "input")


class Markup(str):
    """Text that is markup already; every other string is escaped."""

    __slots__ = ()


def join(parts: list[Markup] | tuple[Markup, ...], between: str = "") -> Markup:
    """Concatenate markup."""
    return Markup(between.join(parts))


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """Return an element; `class_` is class, `data_x` is data-x, True a bare attribute; None and False are omitted."""
    opened = "".join(_attribute(key, value) for key, value in attributes.items())
    inside = "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    return Markup(f"<{name}{opened}>" if name in VOID else f"<{name}{opened}>{inside}</{name}>")


def _attribute(key: str, value: str | float | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
    return f' {name}="{escape(text)}"'
