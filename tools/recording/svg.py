"""Writes screens of a terminal as an animated SVG that needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

CELL_WIDTH, LINE_HEIGHT, FONT_SIZE = 8.4, 19, 14
MARGIN, TITLE_HEIGHT = 16, 36
COLOURS = {"dim": "#8b949e", "cyan": "#76e3ea", "red": "#ff7b72", "green": "#7ee787"}
"""Colours of the styles on the dark window, which is the same on light and dark pages."""

Span = tuple[int, str, str]
"""Column, text and style of a run of cells."""


@dataclass(frozen=True)
class Frame:
    """One picture of the screen.

    Attributes:
        rows: The rows of the screen, each as its spans.
        cursor: Row and column of the cursor; None hides it.
        caption: Text in the title bar.
        seconds: How long the frame is shown.
    """

    rows: tuple[tuple[Span, ...], ...]
    cursor: tuple[int, int] | None
    caption: str
    seconds: float

    def lasting(self, seconds: float) -> Frame:
        """Returns the frame with another duration."""
        return replace(self, seconds=seconds)

    @property
    def text(self) -> str:
        """Text of the screen, without empty rows at the end."""
        lines = []
        for row in self.rows:
            line = ""
            for column, text, _style in row:
                line = line.ljust(column) + text
            lines.append(line)
        return "\n".join(lines).rstrip("\n")


def spans(text: str, styles: Sequence[str]) -> tuple[Span, ...]:
    """Returns the runs of equal style of a row; spaces at their ends are left out."""
    found: list[Span] = []
    start = 0
    for end in range(1, len(text) + 1):
        if end == len(text) or styles[end] != styles[start]:
            part = text[start:end]
            if part.strip():
                blank = len(part) - len(part.lstrip())
                found.append((start + blank, part.strip(), styles[start]))
            start = end
    return tuple(found)


def write_svg(frames: Sequence[Frame], columns: int, rows: int, title: str) -> str:
    """Returns the frames as one SVG document that repeats for ever.

    Equal rows are stored once. Viewers that do not animate show the last frame.

    Args:
        frames: The frames in order.
        columns: Width of the terminal, in cells.
        rows: Height of the terminal, in cells.
        title: Description for screen readers.
    """
    width = round(columns * CELL_WIDTH + 2 * MARGIN)
    height = rows * LINE_HEIGHT + TITLE_HEIGHT + MARGIN
    total = sum(frame.seconds for frame in frames)
    numbers: dict[tuple[Span, ...], int] = {}
    groups, rules = [], []
    begin = 0.0
    for index, frame in enumerate(frames):
        groups.append(_group(frame, index, numbers))
        start, end = 100 * begin / total, 100 * (begin + frame.seconds) / total
        hidden = "" if index == 0 else "0%{visibility:hidden}"
        rules.append(
            f"@keyframes k{index}{{{hidden}{start:.3f}%{{visibility:visible}}"
            f"{end:.3f}%,100%{{visibility:hidden}}}}#f{index}{{animation-name:k{index}}}"
        )
        begin += frame.seconds
    rules[-1] = (
        f"@keyframes k{len(frames) - 1}{{0%{{visibility:hidden}}"
        f"{100 * (total - frames[-1].seconds) / total:.3f}%,100%{{visibility:visible}}}}"
        f"#f{len(frames) - 1}{{animation-name:k{len(frames) - 1}}}"
    )
    definitions = [_row(row, number) for row, number in numbers.items()]
    colours = "".join(f".{name}{{fill:{colour}}}" for name, colour in COLOURS.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            "<style>",
            f"text{{font:{FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"
            "'DejaVu Sans Mono',monospace;fill:#e6edf3;white-space:pre}",
            f".bold{{font-weight:700}}{colours}.bar{{fill:#8b949e;text-anchor:middle}}",
            f".f{{visibility:hidden;animation:{total:.2f}s step-end infinite}}"
            ".f:last-of-type{visibility:visible}",
            *rules,
            "@media(prefers-reduced-motion:reduce){.f{animation:none!important}}",
            "</style>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" '
            'fill="#0d1117" stroke="#30363d"/>',
            *(
                f'<circle cx="{18 + 18 * i}" cy="18" r="5.5" fill="{colour}"/>'
                for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
            ),
            "<defs>",
            *definitions,
            "</defs>",
            *groups,
            "</svg>",
            "",
        ]
    )


def _group(frame: Frame, index: int, numbers: dict[tuple[Span, ...], int]) -> str:
    parts = [f'<text class="bar" x="50%" y="23">{escape(frame.caption)}</text>']
    if frame.cursor is not None:
        row, column = frame.cursor
        x = MARGIN + column * CELL_WIDTH
        y = TITLE_HEIGHT + row * LINE_HEIGHT + 3
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="8" height="16" fill="#8b949e"/>')
    for number, row_spans in enumerate(frame.rows):
        if row_spans:
            name = numbers.setdefault(row_spans, len(numbers))
            y = TITLE_HEIGHT + number * LINE_HEIGHT + FONT_SIZE
            parts.append(f'<use href="#r{name}" y="{y}"/>')
    return f'<g id="f{index}" class="f">{"".join(parts)}</g>'


def _row(row: tuple[Span, ...], number: int) -> str:
    texts = []
    for column, text, style in row:
        kind = f' class="{style}"' if style else ""
        x = MARGIN + column * CELL_WIDTH
        length = len(text) * CELL_WIDTH
        texts.append(
            f'<text{kind} x="{x:.1f}" textLength="{length:.1f}">{escape(text, quote=False)}</text>'
        )
    return f'<g id="r{number}">{"".join(texts)}</g>'
