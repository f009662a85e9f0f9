#!/usr/bin/env python3
"""Draws the contents of a terminal as an SVG.

    tmux capture-pane -p -e -t SESSION | tools/terminal_svg.py > docs/top.svg

Block characters are drawn as shapes, not as letters, so that they join without gaps whatever font the browser has.
"""
import html
import re
import sys

CELL_WIDTH, CELL_HEIGHT, SIZE, MARGIN = 8.4, 18, 14, 12
FOREGROUND, BACKGROUND = "#c9d1d9", "#0d1117"
SIXTEEN = ["#484f58", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#b1bac4",
           "#6e7681", "#ffa198", "#56d364", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#ffffff"]
LEFT = {block: (8 - place) / 8 for place, block in enumerate("█▉▊▋▌▍▎▏")}
LOWER = {block: (place + 1) / 8 for place, block in enumerate("▁▂▃▄▅▆▇")}


def colour(codes):
    """The color that the numbers after the SGR code 38 or 48 name. Colors above 15 of the 256-color palette become the
    default foreground."""
    kind = codes.pop(0)
    if kind == 2:
        return "#%02x%02x%02x" % tuple(codes.pop(0) for _ in range(3))
    number = codes.pop(0)
    return SIXTEEN[number] if number < 16 else FOREGROUND


def apply(style, codes):
    """The style after one escape sequence."""
    style = dict(style)
    while codes:
        code = codes.pop(0)
        if code == 0:
            style = {}
        elif code == 1:
            style["bold"] = True
        elif code == 7:
            style["reversed"] = True
        elif code in (22, 27):
            style.pop("bold" if code == 22 else "reversed", None)
        elif code in (38, 48):
            style["fg" if code == 38 else "bg"] = colour(codes)
        elif code in (39, 49):
            style.pop("fg" if code == 39 else "bg", None)
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style["fg"] = SIXTEEN[code - 30 if code < 90 else code - 82]
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style["bg"] = SIXTEEN[code - 40 if code < 100 else code - 92]
    return style


def cells(line, style):
    """Each character of a line with its style, and the style after the line."""
    found = []
    for part in re.split(r"(\x1b\[[0-9;:]*m)", line):
        if part.startswith("\x1b["):
            style = apply(style, [int(code or 0) for code in re.split("[;:]", part[2:-1])])
        else:
            found += [(letter, style) for letter in part]
    return found, style


def shapes(row, line):
    """The SVG elements of one line: backgrounds and blocks first, then letters in runs of one style."""
    def rectangle(column, width, top, height, fill, opacity=1):
        left, y = MARGIN + column * CELL_WIDTH, MARGIN + (row + top) * CELL_HEIGHT
        faint = f' opacity="{opacity}"' if opacity < 1 else ""
        return (f'<rect x="{left:.2f}" y="{y:.2f}" width="{width * CELL_WIDTH + 0.05:.2f}" '
                f'height="{height * CELL_HEIGHT:.2f}" fill="{fill}"{faint}/>')

    blocks, runs = [], []
    for column, (letter, style) in enumerate(line):
        front, ground = style.get("fg", FOREGROUND), style.get("bg")
        if style.get("reversed"):
            front, ground = ground or BACKGROUND, front
        if ground:
            blocks.append((column, 1, 0, 1, ground, 1))
        if letter in LEFT:
            blocks.append((column, LEFT[letter], 0, 1, front, 1))
        elif letter in LOWER:
            blocks.append((column, 1, 1 - LOWER[letter], LOWER[letter], front, 1))
        elif letter == "░":
            blocks.append((column, 1, 0, 1, front, 0.45))
        elif letter == "─":
            blocks.append((column, 1, 0.47, 0.06, front, 1))
        elif letter != " ":
            look = (front, style.get("bold", False))
            if runs and runs[-1][1] == look and runs[-1][0] + len(runs[-1][2]) == column:
                runs[-1][2].append(letter)
            else:
                runs.append((column, look, [letter]))
    joined = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last and last[2:] == block[2:] and last[1] >= 1 and block[1] == 1 and last[0] + last[1] == block[0]:
            joined[-1] = (last[0], last[1] + 1, *last[2:])
        else:
            joined.append(block)
    yield from (rectangle(*block) for block in joined)
    for column, (front, is_bold), letters in runs:
        left, y = MARGIN + column * CELL_WIDTH, MARGIN + (row + 0.74) * CELL_HEIGHT
        bold = ' font-weight="bold"' if is_bold else ""
        yield (f'<text x="{left:.2f}" y="{y:.2f}" textLength="{len(letters) * CELL_WIDTH:.2f}" '
               f'lengthAdjust="spacingAndGlyphs" fill="{front}"{bold}>{html.escape("".join(letters))}</text>')


def main():
    style, lines = {}, []
    for line in sys.stdin.read().rstrip("\n").split("\n"):
        found, style = cells(line, style)
        lines.append(found)
    width = 2 * MARGIN + max(len(line) for line in lines) * CELL_WIDTH
    height = 2 * MARGIN + len(lines) * CELL_HEIGHT
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
          f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" '
          f'font-size="{SIZE}">')
    print(f'<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>')
    for row, line in enumerate(lines):
        print("\n".join(shapes(row, line)))
    print("</svg>")


if __name__ == "__main__":
    main()
